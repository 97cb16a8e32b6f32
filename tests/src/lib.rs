//! What the tests of the whole share.

pub mod oracle;
