//! Publishing a folder as one commit.

use std::path::PathBuf;

use hf_hub::repository::{AddSource, CommitOperation};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use serde::Deserialize;
use serde_json::json;

use crate::error::chain;
use crate::{Error, Hub, Repo};

/// Files up to this size may travel inside the commit.
const INLINE: u64 = 50 << 20;

/// The answer to a batch request, as far as it matters.
#[derive(Deserialize)]
struct Batch {
    transfer: Option<String>,
}

/// What to publish.
#[derive(Clone, Debug)]
pub struct Upload {
    /// Folder.
    pub folder: PathBuf,
    /// Files of it.
    pub files: Vec<LocalFile>,
    /// First line of the commit.
    pub message: String,
    /// Propose the commit as a pull request instead of making it.
    pub as_pull_request: bool,
    /// Whether a repository that has to be made first is private.
    pub private: bool,
}

/// A file to publish.
#[derive(Clone, Debug)]
pub struct LocalFile {
    /// Path below the folder, with `/` between components.
    pub path: String,
    /// Length in bytes.
    pub size: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

/// What was published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Address of the commit.
    pub commit: Option<String>,
    /// Address of the pull request, or of the list it is in.
    pub pull_request: Option<String>,
}

impl Hub {
    /// Makes the repository if need be and commits all files at once, so that nobody sees
    /// half of them. Large files are stored before the commit; what of them arrived is not
    /// sent again by a later try.
    ///
    /// # Errors
    /// No access, no answer, or a file that cannot be read.
    pub fn publish(&self, repo: &Repo, upload: &Upload) -> Result<Published, Error> {
        self.online(repo)?;
        let tries = self.settings.tries;
        let what = repo.id();
        let api = |e| Error::of_api(&what, tries, e);
        let add = |file: &LocalFile| CommitOperation::Add {
            path_in_repo: file.path.clone(),
            source: AddSource::File(upload.folder.join(&file.path)),
        };
        self.runtime.block_on(async {
            self.api
                .create_repository()
                .repo_id(&repo.id())
                .repo_type(hf_hub::RepoTypeModel)
                .private(upload.private)
                .exist_ok(true)
                .send()
                .await
                .map_err(api)?;
            self.takes_large_files(repo, upload).await?;
            let info = self
                .model(repo)
                .create_commit()
                .operations(upload.files.iter().map(add).collect())
                .commit_message(upload.message.clone())
                .revision(repo.revision())
                .create_pr(upload.as_pull_request)
                .send()
                .await
                .map_err(api)?;
            // The Hub calls the address `pullRequestUrl`, which `hf-hub` 1.0 does not read.
            let proposed = || {
                let endpoint = self.settings.endpoint.trim_end_matches('/');
                format!("{endpoint}/{}/discussions", repo.id())
            };
            Ok(Published {
                commit: info.commit_url,
                pull_request: upload
                    .as_pull_request
                    .then(|| info.pr_url.unwrap_or_else(proposed)),
            })
        })
    }

    /// Where the Hub does not store large files through Xet, `hf-hub` 1.0 puts them into
    /// the commit itself, as text and in memory. That is refused before it begins.
    async fn takes_large_files(&self, repo: &Repo, upload: &Upload) -> Result<(), Error> {
        let large: Vec<&LocalFile> = upload.files.iter().filter(|f| f.size > INLINE).collect();
        if large.is_empty() {
            return Ok(());
        }
        let what = repo.id();
        let unavailable = |e: reqwest::Error| Error::Unavailable {
            what: what.clone(),
            tries: 1,
            problem: chain(&e),
        };
        let objects: Vec<_> = large
            .iter()
            .map(|f| json!({ "oid": f.sha256, "size": f.size }))
            .collect();
        let body = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart", "xet"],
            "objects": objects,
            "hash_algo": "sha256",
            "ref": { "name": repo.revision() },
        });
        let endpoint = self.settings.endpoint.trim_end_matches('/');
        let kind = "application/vnd.git-lfs+json";
        let mut request = self
            .http
            .post(format!("{endpoint}/{what}.git/info/lfs/objects/batch"))
            .header(ACCEPT, kind)
            .header(CONTENT_TYPE, kind)
            .body(body.to_string());
        if let Some(token) = &self.settings.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let answer = request.send().await.map_err(unavailable)?;
        let status = answer.status().as_u16();
        if status != 200 {
            return Err(
                Error::of_status(&what, status).unwrap_or(Error::Unavailable {
                    what,
                    tries: 1,
                    problem: format!("HTTP {status}"),
                }),
            );
        }
        let answer = answer.bytes().await.map_err(unavailable)?;
        let transfer = serde_json::from_slice::<Batch>(&answer)
            .ok()
            .and_then(|b| b.transfer);
        if transfer.as_deref() == Some("xet") {
            return Ok(());
        }
        Err(Error::Answer {
            what,
            problem: format!(
                "it takes `{}` ({} bytes) by `{}`, and this program can send large files by \
                 `xet` only",
                large[0].path,
                large[0].size,
                transfer.unwrap_or_else(|| "basic".into())
            ),
        })
    }
}
