//! Names of repositories.

use std::fmt;

/// A model repository, `owner/name` with an optional `@revision`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repo {
    /// User or organisation.
    pub owner: String,
    /// Name.
    pub name: String,
    /// Branch, tag or commit; `main` if absent.
    pub revision: Option<String>,
}

impl Repo {
    /// Reads `owner/name[@revision]`; `None` for anything else, such as a path.
    pub fn parse(text: &str) -> Option<Self> {
        let (id, revision) = match text.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (text, None),
        };
        let (owner, name) = id.split_once('/')?;
        let sound = |part: &str| {
            part.starts_with(|c: char| c.is_ascii_alphanumeric())
                && part.len() <= 96
                && !part.contains("..")
                && part
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        let sound_revision = |r: &str| r.split('/').all(sound);
        if !sound(owner) || !sound(name) || !revision.is_none_or(sound_revision) {
            return None;
        }
        Some(Self {
            owner: owner.into(),
            name: name.into(),
            revision: revision.map(Into::into),
        })
    }

    /// `owner/name`.
    pub fn id(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    pub(crate) fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Folder in the cache.
    pub(crate) fn cache_folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        match &self.revision {
            Some(revision) => write!(f, "@{revision}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_paths_are_not() {
        for text in ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B@main", "a/b@refs/pr/1"] {
            assert_eq!(Repo::parse(text).unwrap().to_string(), text);
        }
        for text in [
            "Qwen3-8B",
            "./Qwen/Qwen3-8B",
            "/models/x",
            "../x",
            "a/b/c",
            "a/",
            "a/b@",
            "a/b@../x",
            "a/..",
            "a b/c",
            "~/x",
        ] {
            assert_eq!(Repo::parse(text), None, "{text}");
        }
    }
}
