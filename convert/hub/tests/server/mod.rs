//! A small Hub on this machine: the parts of the real HTTP interface that downloads and
//! uploads use, with faults to order. Every connection serves one request.

#![allow(dead_code, reason = "each test binary uses its own share")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The only commit.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// The only repository.
pub(crate) const REPO: &str = "someone/tiny";

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// The connection ends after so many bytes of the body.
    Cut(usize),
    /// This status, with so many seconds to wait.
    Status(u16, Option<u64>),
    /// A byte of the body is another.
    Corrupt,
    /// The whole file is sent though a part was asked for.
    Whole,
}

/// A fault for the next `times` requests whose path contains `path`.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) path: String,
    pub(crate) times: usize,
    pub(crate) kind: Kind,
}

/// A request as the tests see it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) range: Option<String>,
    pub(crate) authorization: Option<String>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    pub(crate) faults: Vec<Fault>,
    /// Where set, requests need it.
    pub(crate) token: Option<String>,
    pub(crate) seen: Vec<Seen>,
    /// What was committed, by repository and path, and whether as a pull request.
    pub(crate) pushed: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    pub(crate) as_pull_request: bool,
    /// Requests to make a repository that were granted, by name.
    pub(crate) created: BTreeMap<String, Value>,
    pub(crate) summary: String,
    /// Pause after each 16 KiB sent.
    pub(crate) pause: Duration,
}

/// The server, for as long as the test runs.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<Mutex<State>>,
}

impl Server {
    pub(crate) fn start(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State {
            files,
            ..State::default()
        }));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                // A client that goes away is the test's business.
                thread::spawn(move || serve(stream, &shared));
            }
        });
        Self { address, state }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn fault(&self, path: &str, times: usize, kind: Kind) {
        let path = path.to_string();
        let fault = Fault { path, times, kind };
        self.state.lock().unwrap().faults.push(fault);
    }

    /// Requests for a path that contains `part`.
    pub(crate) fn seen(&self, part: &str) -> Vec<Seen> {
        let state = self.state.lock().unwrap();
        let found = state.seen.iter().filter(|s| s.path.contains(part));
        found.cloned().collect()
    }
}

struct Request {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_string(), words.next()?.to_string());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_string());
    }
    let mut body = Vec::new();
    if let Some(length) = headers.get("content-length") {
        body.resize(length.parse().ok()?, 0);
        reader.read_exact(&mut body).ok()?;
    } else if headers
        .get("transfer-encoding")
        .is_some_and(|t| t == "chunked")
    {
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let size = usize::from_str_radix(line.trim(), 16).ok()?;
            let start = body.len();
            body.resize(start + size, 0);
            reader.read_exact(&mut body[start..]).ok()?;
            reader.read_line(&mut String::new()).ok()?;
            if size == 0 {
                break;
            }
        }
    }
    Some(Request {
        method,
        path,
        headers,
        body,
    })
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

fn plain(status: u16, body: &str) -> Answer {
    Answer {
        status,
        headers: Vec::new(),
        body: body.as_bytes().to_vec(),
    }
}

fn ok_json(value: &Value) -> Answer {
    Answer {
        status: 200,
        headers: vec![("Content-Type", "application/json".into())],
        body: value.to_string().into_bytes(),
    }
}

fn serve(mut stream: TcpStream, shared: &Mutex<State>) {
    let Some(request) = read_request(&stream) else {
        return;
    };
    let (answer, fault, pause) = {
        let mut state = shared.lock().unwrap();
        state.seen.push(Seen {
            method: request.method.clone(),
            path: request.path.clone(),
            range: request.headers.get("range").cloned(),
            authorization: request.headers.get("authorization").cloned(),
        });
        let fault = state
            .faults
            .iter_mut()
            .find(|f| f.times > 0 && request.path.contains(&f.path))
            .map(|f| {
                f.times -= 1;
                f.kind
            });
        (answer(&mut state, &request, fault), fault, state.pause)
    };
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", answer.status);
    let _ = write!(head, "Content-Length: {}\r\n", answer.body.len());
    for (name, value) in &answer.headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    head.push_str("\r\n");
    let sent = match fault {
        Some(Kind::Cut(at)) => &answer.body[..at.min(answer.body.len())],
        _ => &answer.body,
    };
    if request.method == "HEAD" || stream.write_all(head.as_bytes()).is_err() {
        return;
    }
    for piece in sent.chunks(16 << 10) {
        if stream.write_all(piece).is_err() {
            return;
        }
        if !pause.is_zero() {
            thread::sleep(pause);
        }
    }
}

fn answer(state: &mut State, request: &Request, fault: Option<Kind>) -> Answer {
    if let Some(Kind::Status(status, wait)) = fault {
        let mut answer = plain(status, "<html>not what you asked for</html>");
        if let Some(seconds) = wait {
            answer.headers.push(("Retry-After", seconds.to_string()));
        }
        return answer;
    }
    if let Some(token) = &state.token {
        match request.headers.get("authorization") {
            None => return plain(401, "{\"error\":\"Invalid credentials\"}"),
            Some(given) if *given != format!("Bearer {token}") => {
                return plain(403, "{\"error\":\"Forbidden\"}");
            }
            Some(_) => {}
        }
    }
    let (path, query) = match request.path.split_once('?') {
        Some((path, query)) => (path, query),
        None => (request.path.as_str(), ""),
    };
    let listing = format!("/api/models/{REPO}/revision/");
    let files = format!("/{REPO}/resolve/{COMMIT}/");
    if let Some(revision) = path.strip_prefix(&listing) {
        return if [COMMIT, "main", "v1"].contains(&revision) {
            list(state, query)
        } else {
            plain(404, "{\"error\":\"Invalid rev id\"}")
        };
    }
    if let Some(name) = path.strip_prefix(&files) {
        return match state.files.get(name) {
            Some(bytes) => file(bytes, request, fault),
            None => plain(404, "Entry not found"),
        };
    }
    if path == "/api/repos/create" {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        let name = body["name"].as_str().unwrap().to_string();
        if state.created.contains_key(&name) {
            return plain(409, "{\"error\":\"You already created this model repo\"}");
        }
        state.created.insert(name.clone(), body);
        return ok_json(&json!({ "url": format!("https://hub/someone/{name}") }));
    }
    if path.ends_with(".git/info/lfs/objects/batch") {
        return ok_json(&json!({ "transfer": "basic", "objects": [] }));
    }
    let made = path.strip_prefix("/api/models/someone/").and_then(|rest| {
        let mut parts = rest.splitn(3, '/');
        let (name, what) = (parts.next()?, parts.next()?);
        state.created.contains_key(name).then_some((name, what))
    });
    match made {
        Some((_, "preupload")) => {
            let body: Value = serde_json::from_slice(&request.body).unwrap();
            let modes: Vec<Value> = body["files"]
                .as_array()
                .unwrap()
                .iter()
                .map(|f| json!({ "path": f["path"], "uploadMode": "regular", "shouldIgnore": false }))
                .collect();
            return ok_json(&json!({ "files": modes }));
        }
        Some((name, "commit")) => return commit(state, name, request, query),
        _ => {}
    }
    plain(404, "{\"error\":\"Repository not found\"}")
}

fn list(state: &State, query: &str) -> Answer {
    assert_eq!(query, "blobs=true");
    let siblings: Vec<Value> = state
        .files
        .iter()
        .map(|(name, bytes)| {
            let git = Sha1::new()
                .chain_update(format!("blob {}\0", bytes.len()))
                .chain_update(bytes)
                .finalize();
            let mut file = json!({
                "rfilename": name, "size": bytes.len(), "blobId": hex(&git),
            });
            if name.ends_with(".safetensors") {
                file["lfs"] = json!({
                    "sha256": hex(&Sha256::digest(bytes)), "size": bytes.len(), "pointerSize": 134,
                });
            }
            file
        })
        .collect();
    ok_json(&json!({ "id": REPO, "sha": COMMIT, "siblings": siblings }))
}

fn file(bytes: &[u8], request: &Request, fault: Option<Kind>) -> Answer {
    let from = request
        .headers
        .get("range")
        .and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok())
        .unwrap_or(0usize);
    let partial = from > 0 && !matches!(fault, Some(Kind::Whole));
    let start = if partial { from } else { 0 };
    let mut body = bytes[start..].to_vec();
    if matches!(fault, Some(Kind::Corrupt)) {
        let middle = body.len() / 2;
        body[middle] ^= 1;
    }
    let mut headers = vec![("ETag", "\"x\"".to_string())];
    if partial {
        let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
        headers.push(("Content-Range", range));
    }
    Answer {
        status: if partial { 206 } else { 200 },
        headers,
        body,
    }
}

fn commit(state: &mut State, name: &str, request: &Request, query: &str) -> Answer {
    for line in request
        .body
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
    {
        let line: Value = serde_json::from_slice(line).unwrap();
        let value = &line["value"];
        match line["key"].as_str().unwrap() {
            "header" => state.summary = value["summary"].as_str().unwrap().to_string(),
            "file" => {
                assert_eq!(value["encoding"], "base64");
                let path = value["path"].as_str().unwrap().to_string();
                let bytes = base64(value["content"].as_str().unwrap());
                let repo = state.pushed.entry(name.to_string()).or_default();
                repo.insert(path, bytes);
            }
            other => panic!("unexpected {other}"),
        }
    }
    state.as_pull_request = query.contains("create_pr=1");
    let mut info = json!({
        "success": true, "commitOid": COMMIT, "commitUrl": format!("https://hub/commit/{COMMIT}"),
    });
    if state.as_pull_request {
        info["pullRequestUrl"] = "https://hub/discussions/1".into();
    }
    ok_json(&info)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

fn base64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("`{}` is not base64", c as char),
    };
    let digits: Vec<u8> = text.bytes().filter(|c| *c != b'=').map(value).collect();
    let mut out = Vec::new();
    for group in digits.chunks(4) {
        let bits = group.iter().fold(0u32, |all, d| all << 6 | u32::from(*d));
        let bits = bits << (6 * (4 - group.len()));
        out.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    out
}
