//! Checkpoints from the Hugging Face Hub, model folders to it.
//!
//! Publishing goes through `hf-hub`. Downloading does not: `hf-hub` 1.0 cannot ask for
//! the digests of a commit's files, begins a file anew after a cut, does not check what
//! came, and renames it to its final name even if it is an error page. So files are
//! fetched here, over the HTTP client it is built on: continued where they broke off, and
//! given their name only once size and digest are right.
//!
//! The cache is that of Hugging Face's own tools (`blobs`, `snapshots`, `refs`), so what
//! they downloaded is found here, and the other way round.

mod download;
mod error;
mod repo;
mod upload;

use std::path::PathBuf;
use std::time::Duration;

pub use download::{RemoteFile, Snapshot};
pub use error::Error;
pub use repo::Repo;
pub use upload::{LocalFile, Published, Upload};

/// No byte for so long counts as a broken connection.
const SILENCE: Duration = Duration::from_mins(1);

/// Where the Hub is and who asks.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Base address.
    pub endpoint: String,
    /// Access token.
    pub token: Option<String>,
    /// Folder of the cache.
    pub cache: PathBuf,
    /// Never use the network.
    pub offline: bool,
    /// First pause before trying again; doubled each time.
    pub pause: Duration,
    /// How often something is tried before giving up.
    pub tries: usize,
}

impl Settings {
    /// As Hugging Face's tools read them: `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`,
    /// `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`.
    pub fn from_env() -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let cache_home = || {
            let home = || PathBuf::from(set("HOME").unwrap_or_default()).join(".cache");
            let cache = set("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
            cache.join("huggingface")
        };
        let home = set("HF_HOME").map_or_else(cache_home, PathBuf::from);
        let token = set("HF_TOKEN").or_else(|| {
            let path = set("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
            let token = std::fs::read_to_string(path).ok()?;
            Some(token.trim().to_string()).filter(|t| !t.is_empty())
        });
        Self {
            endpoint: set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            token,
            cache: set("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            offline: set("HF_HUB_OFFLINE")
                .is_some_and(|v| !["0", "false", "off"].contains(&v.as_str())),
            pause: Duration::from_secs(1),
            tries: 6,
        }
    }
}

/// A connection to the Hub.
pub struct Hub {
    settings: Settings,
    runtime: tokio::runtime::Runtime,
    http: reqwest::Client,
    api: hf_hub::HFClient,
}

impl Hub {
    /// Connects on first use.
    ///
    /// # Errors
    /// Settings that make no client.
    pub fn new(settings: Settings) -> Result<Self, Error> {
        let agent = concat!("anemone-hub/", env!("CARGO_PKG_VERSION"));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| Error::Client(source.to_string()))?;
        let http = reqwest::Client::builder()
            .user_agent(agent)
            .connect_timeout(Duration::from_secs(20))
            .read_timeout(SILENCE)
            .build()
            .map_err(|e| Error::Client(e.to_string()))?;
        let mut builder = hf_hub::HFClient::builder()
            .endpoint(&settings.endpoint)
            .cache_dir(&settings.cache)
            .retry_max_attempts(settings.tries.saturating_sub(1))
            .retry_base_delay(settings.pause)
            .client(http.clone());
        if let Some(token) = &settings.token {
            builder = builder.token(token);
        }
        let api = builder.build().map_err(|e| Error::Client(e.to_string()))?;
        Ok(Self {
            settings,
            runtime,
            http,
            api,
        })
    }

    fn model(&self, repo: &Repo) -> hf_hub::HFRepository<hf_hub::RepoTypeModel> {
        self.api.model(&repo.owner, &repo.name)
    }

    fn online(&self, repo: &Repo) -> Result<(), Error> {
        if self.settings.offline {
            return Err(Error::Offline {
                repo: repo.to_string(),
                cache: self.settings.cache.clone(),
            });
        }
        Ok(())
    }
}
