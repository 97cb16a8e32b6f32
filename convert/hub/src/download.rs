//! Fetching the files of a commit into the cache.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_RANGE, RANGE, RETRY_AFTER};
use serde::Deserialize;
use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::error::chain;
use crate::{Error, Hub, Repo};

/// Longest wait that a `Retry-After` is obeyed for.
const LONGEST_PAUSE: Duration = Duration::from_mins(5);

/// Listings are some kilobytes.
const MAX_LISTING: usize = 64 << 20;

/// A file of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Name; files in folders are not looked at.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
    digest: Listed,
}

/// The digest that the Hub lists; also the name of the file in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Listed {
    /// SHA-256 of the contents, for files stored apart from git.
    Sha256(String),
    /// Git's object id: SHA-1 of a header with the length, and the contents.
    Git(String),
}

impl Listed {
    fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Git(hex) => hex,
        }
    }
}

/// The wanted files of one commit, in the cache or still to be fetched.
#[derive(Clone, Debug)]
pub struct Snapshot {
    repo: Repo,
    /// The commit.
    pub commit: String,
    /// Folder in the cache whose files are those of the commit.
    pub folder: PathBuf,
    /// Files not in the cache yet.
    pub missing: Vec<RemoteFile>,
    /// Files in the cache, and those missing.
    pub files: usize,
    blobs: PathBuf,
}

impl Snapshot {
    /// Bytes still to be fetched, what a broken download left counted as there.
    pub fn missing_bytes(&self) -> u64 {
        self.missing
            .iter()
            .map(|file| {
                let there = fs::metadata(self.partial(file)).map_or(0, |m| m.len());
                file.size.saturating_sub(there)
            })
            .sum()
    }

    fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.blobs.join(file.digest.hex())
    }

    fn partial(&self, file: &RemoteFile) -> PathBuf {
        self.blobs.join(format!("{}.incomplete", file.digest.hex()))
    }
}

/// What the Hub says about a commit when asked with `blobs=true`.
#[derive(Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
}

impl Hub {
    /// The files of a revision. `hf-hub` 1.0 has no way to ask for their digests.
    async fn listing(&self, repo: &Repo) -> Result<Listing, Error> {
        let what = repo.to_string();
        let url = format!(
            "{}/api/models/{}/revision/{}?blobs=true",
            self.settings.endpoint.trim_end_matches('/'),
            repo.id(),
            repo.revision().replace('/', "%2F"),
        );
        let mut pause = self.settings.pause;
        let mut problem = String::new();
        for attempt in 0..self.settings.tries {
            if attempt > 0 {
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            let mut request = self.http.get(&url);
            if let Some(token) = &self.settings.token {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            let mut response = match request.send().await {
                Ok(response) => response,
                Err(e) => {
                    problem = chain(&e);
                    continue;
                }
            };
            let status = response.status().as_u16();
            if status != 200 {
                if let Some(error) = Error::of_status(&what, status) {
                    return Err(error);
                }
                problem = format!("HTTP {status}");
                pause = retry_after(&response).unwrap_or(pause);
                continue;
            }
            match whole(&mut response).await {
                Ok(body) => {
                    return serde_json::from_slice(&body).map_err(|e| Error::Answer {
                        what,
                        problem: e.to_string(),
                    });
                }
                Err(e) => problem = e,
            }
        }
        Err(Error::Unavailable {
            what,
            tries: self.settings.tries,
            problem,
        })
    }

    /// Which files of a repository that are `wanted` must be fetched. Offline, the cache
    /// alone answers, and nothing may be missing.
    ///
    /// # Errors
    /// No such repository, no access, no answer.
    pub fn look_up(&self, repo: &Repo, wanted: impl Fn(&str) -> bool) -> Result<Snapshot, Error> {
        let root = self.settings.cache.join(repo.cache_folder());
        if self.settings.offline {
            return self.look_up_offline(repo, &root);
        }
        let what = repo.to_string();
        let listing: Listing = self.runtime.block_on(self.listing(repo))?;
        let commit = listing.sha;
        if !is_hex(&commit, 40) {
            return Err(Error::Answer {
                what,
                problem: format!("`{commit}` is no commit"),
            });
        }
        let mut snapshot = Snapshot {
            repo: repo.clone(),
            folder: root.join("snapshots").join(&commit),
            blobs: root.join("blobs"),
            commit,
            missing: Vec::new(),
            files: 0,
        };
        for entry in listing.siblings {
            let path = entry.rfilename;
            if !is_plain(&path) || !wanted(&path) {
                continue;
            }
            let digest = match (entry.lfs, entry.blob_id) {
                (Some(lfs), _) => Listed::Sha256(lfs.sha256),
                (None, blob) => Listed::Git(blob.unwrap_or_default()),
            };
            let size = entry.size.ok_or_else(|| Error::Answer {
                what: path.clone(),
                problem: "no size".into(),
            })?;
            if !is_hex(digest.hex(), 40) && !is_hex(digest.hex(), 64) {
                return Err(Error::Answer {
                    what: path,
                    problem: format!("`{}` is no digest", digest.hex()),
                });
            }
            let file = RemoteFile {
                name: path,
                size,
                digest,
            };
            snapshot.files += 1;
            let there = |path: &Path| fs::metadata(path).is_ok_and(|m| m.len() == size);
            if there(&snapshot.blob(&file)) || there(&snapshot.folder.join(&file.name)) {
                link(&snapshot, &file)?;
            } else {
                snapshot.missing.push(file);
            }
        }
        if snapshot.missing.is_empty() {
            name_commit(&snapshot, &root)?;
        }
        Ok(snapshot)
    }

    fn look_up_offline(&self, repo: &Repo, root: &Path) -> Result<Snapshot, Error> {
        let revision = repo.revision();
        let commit = if is_hex(revision, 40) {
            revision.to_string()
        } else {
            let named = fs::read_to_string(root.join("refs").join(revision));
            named.map(|t| t.trim().to_string()).unwrap_or_default()
        };
        let folder = root.join("snapshots").join(&commit);
        if !is_hex(&commit, 40) || !folder.is_dir() {
            self.online(repo)?;
        }
        let files = fs::read_dir(&folder).map_or(0, Iterator::count);
        Ok(Snapshot {
            repo: repo.clone(),
            blobs: root.join("blobs"),
            commit,
            folder,
            missing: Vec::new(),
            files,
        })
    }

    /// Fetches what is missing. `progress` is told the file and the bytes that came;
    /// between two pieces `stop` is asked whether to go on later.
    ///
    /// # Errors
    /// No access, no answer after several tries, or contents that are not as listed.
    pub fn fetch(
        &self,
        snapshot: &Snapshot,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&str, u64),
    ) -> Result<(), Error> {
        for file in &snapshot.missing {
            self.online(&snapshot.repo)?;
            self.runtime
                .block_on(self.fetch_file(snapshot, file, stop, progress))?;
            link(snapshot, file)?;
        }
        let root = snapshot.blobs.parent().unwrap_or(&snapshot.blobs);
        name_commit(snapshot, root)
    }

    async fn fetch_file(
        &self,
        snapshot: &Snapshot,
        file: &RemoteFile,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&str, u64),
    ) -> Result<(), Error> {
        let at = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::Io { path, source }
        };
        fs::create_dir_all(&snapshot.blobs).map_err(at(&snapshot.blobs))?;
        let partial = snapshot.partial(file);
        let mut out = OpenOptions::new()
            .create(true)
            .append(true)
            .read(true)
            .open(&partial)
            .map_err(at(&partial))?;
        // Another process that fetches the same file is waited for; the lock goes with
        // the handle.
        out.lock().map_err(at(&partial))?;
        if fs::metadata(snapshot.blob(file)).is_ok_and(|m| m.len() == file.size) {
            return Ok(());
        }
        let what = format!("{}/{}", snapshot.repo.id(), file.name);
        let mut failures = 0;
        let mut damaged = false;
        let mut pause = self.settings.pause;
        loop {
            let problem = match self
                .continue_file(snapshot, file, &mut out, stop, progress)
                .await
            {
                Ok(()) => match verify(&mut out, file) {
                    Ok(None) => break,
                    Ok(Some(found)) => {
                        out.set_len(0).map_err(at(&partial))?;
                        // Once may be an accident of the line; twice is the source.
                        if damaged {
                            drop(out);
                            let _ = fs::remove_file(&partial);
                            return Err(Error::Damaged {
                                repo: snapshot.repo.to_string(),
                                file: file.name.clone(),
                                expected: file.digest.hex().to_string(),
                                found,
                            });
                        }
                        damaged = true;
                        continue;
                    }
                    Err(source) => return Err(at(&partial)(source)),
                },
                Err(Broken::For(error)) => return Err(*error),
                Err(Broken::Now {
                    problem,
                    after,
                    came,
                }) => {
                    if came > 0 {
                        // A line that carries something is worth another try.
                        failures = 0;
                        pause = self.settings.pause;
                    }
                    pause = after.unwrap_or(pause);
                    problem
                }
            };
            failures += 1;
            if failures >= self.settings.tries {
                return Err(Error::Unavailable {
                    what,
                    tries: failures,
                    problem,
                });
            }
            if stop() {
                return Err(Error::Stopped);
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        out.sync_all().map_err(at(&partial))?;
        let blob = snapshot.blob(file);
        fs::rename(&partial, &blob).map_err(at(&blob))
    }

    /// One request for what is missing of a file.
    async fn continue_file(
        &self,
        snapshot: &Snapshot,
        file: &RemoteFile,
        out: &mut File,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(&str, u64),
    ) -> Result<(), Broken> {
        let io = |source| {
            Broken::For(Box::new(Error::Io {
                path: snapshot.partial(file),
                source,
            }))
        };
        let mut there = out.metadata().map_err(io)?.len();
        if there > file.size {
            out.set_len(0).map_err(io)?;
            there = 0;
        }
        if there == file.size {
            return Ok(());
        }
        let url = format!(
            "{}/{}/resolve/{}/{}",
            self.settings.endpoint.trim_end_matches('/'),
            snapshot.repo.id(),
            snapshot.commit,
            file.name
        );
        let mut request = self.http.get(url);
        if let Some(token) = &self.settings.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if there > 0 {
            request = request.header(RANGE, format!("bytes={there}-"));
        }
        let now = |problem: String, after, came| Broken::Now {
            problem,
            after,
            came,
        };
        let mut response = request.send().await.map_err(|e| now(chain(&e), None, 0))?;
        let status = response.status().as_u16();
        let what = format!("{}/{}", snapshot.repo.id(), file.name);
        let from = match status {
            200 => 0,
            206 => {
                let range = response.headers().get(CONTENT_RANGE);
                let range = range.and_then(|r| r.to_str().ok()).unwrap_or_default();
                first_of_range(range).unwrap_or(u64::MAX)
            }
            _ => {
                if let Some(error) = Error::of_status(&what, status) {
                    return Err(Broken::For(Box::new(error)));
                }
                return Err(now(format!("HTTP {status}"), retry_after(&response), 0));
            }
        };
        if from != there {
            if from != 0 {
                let problem = format!("asked for bytes from {there}, got them from {from}");
                return Err(Broken::For(Box::new(Error::Answer { what, problem })));
            }
            out.set_len(0).map_err(io)?;
            there = 0;
        }
        let mut came = 0;
        loop {
            let piece = match response.chunk().await {
                Ok(Some(piece)) => piece,
                Ok(None) => break,
                Err(e) => return Err(now(chain(&e), None, came)),
            };
            // More than listed is never stored.
            let room = file.size - there;
            let take = usize::try_from(room).map_or(piece.len(), |room| room.min(piece.len()));
            out.write_all(&piece[..take]).map_err(io)?;
            there += take as u64;
            came += take as u64;
            progress(&file.name, take as u64);
            if take < piece.len() {
                break;
            }
            if stop() {
                return Err(Broken::For(Box::new(Error::Stopped)));
            }
        }
        if there < file.size {
            let problem = format!("the connection ended after {there} of {} bytes", file.size);
            return Err(now(problem, None, came));
        }
        Ok(())
    }
}

/// Why a request did not bring the file.
enum Broken {
    /// Trying again is pointless.
    For(Box<Error>),
    /// It may work later.
    Now {
        problem: String,
        after: Option<Duration>,
        came: u64,
    },
}

/// The digest of a whole file if it is not the listed one.
fn verify(out: &mut File, file: &RemoteFile) -> io::Result<Option<String>> {
    use io::Seek;
    out.rewind()?;
    let found = match &file.digest {
        Listed::Sha256(_) => digest(out, Sha256::new())?,
        Listed::Git(_) => {
            let header = format!("blob {}\0", file.size);
            digest(out, Sha1::new().chain_update(header))?
        }
    };
    Ok((found != file.digest.hex()).then_some(found))
}

fn digest<D: Digest>(from: &mut File, mut hash: D) -> io::Result<String> {
    let mut slab = vec![0; 1 << 20];
    loop {
        let n = from.read(&mut slab)?;
        if n == 0 {
            break;
        }
        hash.update(&slab[..n]);
    }
    let digest = hash.finalize();
    Ok(digest.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    }))
}

/// `17` of `bytes 17-99/100`.
fn first_of_range(range: &str) -> Option<u64> {
    range
        .strip_prefix("bytes ")?
        .split('-')
        .next()?
        .parse()
        .ok()
}

/// Puts a file of the cache under its name in the snapshot.
fn link(snapshot: &Snapshot, file: &RemoteFile) -> Result<(), Error> {
    let path = snapshot.folder.join(&file.name);
    let at = |source| Error::Io {
        path: path.clone(),
        source,
    };
    if fs::metadata(&path).is_ok_and(|m| m.len() == file.size) {
        return Ok(());
    }
    fs::create_dir_all(&snapshot.folder).map_err(at)?;
    let _ = fs::remove_file(&path);
    let blob = Path::new("../../blobs").join(file.digest.hex());
    match std::os::unix::fs::symlink(blob, &path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(at(e)),
        _ => Ok(()),
    }
}

/// Notes which commit the revision is, for offline use. Written last: it says that the
/// snapshot is whole.
fn name_commit(snapshot: &Snapshot, root: &Path) -> Result<(), Error> {
    let revision = snapshot.repo.revision();
    if is_hex(revision, 40) {
        return Ok(());
    }
    let path = root.join("refs").join(revision);
    let at = |source| Error::Io {
        path: path.clone(),
        source,
    };
    fs::create_dir_all(path.parent().unwrap_or(root)).map_err(at)?;
    fs::write(&path, &snapshot.commit).map_err(at)
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// The Hub's list is untrusted: a name must not lead out of the folder.
fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('.')
        && name.len() < 200
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.+".contains(&b))
}

/// The body of an answer, within reason.
async fn whole(response: &mut reqwest::Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(|e| chain(&e))? {
        body.extend_from_slice(&piece);
        if body.len() > MAX_LISTING {
            return Err(format!("an answer of more than {MAX_LISTING} bytes"));
        }
    }
    Ok(body)
}

/// How long the Hub asks to wait.
fn retry_after(response: &reqwest::Response) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    Some(Duration::from_secs(seconds.trim().parse().ok()?).min(LONGEST_PAUSE))
}
