//! What a check found: how bad it is, and what to do about it.

use serde::Serialize;

/// How a finding shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// It does not run.
    Fatal,
    /// It runs and gives other results than it should, without a word.
    Silent,
    /// It runs slower than it should.
    Performance,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Self::Fatal => "fatal",
            Self::Silent => "silent",
            Self::Performance => "performance",
        }
    }
}

/// A finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How it shows.
    pub class: Class,
    /// What is wrong, naming the file.
    pub what: String,
    /// What to do about it.
    pub fix: String,
}

impl Finding {
    pub(super) fn new(class: Class, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            class,
            what: what.into(),
            fix: fix.into(),
        }
    }

    /// Two lines for people.
    pub fn text(&self) -> String {
        format!(
            "{:<12} {}\n{:<12} fix: {}\n",
            self.class.name(),
            self.what,
            "",
            self.fix
        )
    }
}
