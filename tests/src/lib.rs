//! What the integration tests share.

pub mod drafting;
pub mod drafts;
pub mod line;
pub mod oracle;
pub mod reference;
