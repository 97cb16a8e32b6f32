//! What the integration tests share.

pub mod line;
pub mod oracle;
pub mod reference;
