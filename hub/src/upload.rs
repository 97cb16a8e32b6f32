//! Publishing a folder as one commit.

use std::path::{Path, PathBuf};

use hf_hub::repository::{AddSource, CommitOperation};

use crate::{Error, Hub, Repo};

/// What to publish.
#[derive(Clone, Debug)]
pub struct Upload {
    /// Folder.
    pub folder: PathBuf,
    /// Files of it, with `/` between components.
    pub files: Vec<String>,
    /// First line of the commit.
    pub message: String,
    /// Propose the commit as a pull request instead of making it.
    pub as_pull_request: bool,
    /// Whether a repository that has to be made first is private.
    pub private: bool,
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
        let add = |name: &String| CommitOperation::Add {
            path_in_repo: name.clone(),
            source: AddSource::File(Path::new(&upload.folder).join(name)),
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
}
