//! Checks.
use super::ir::Module;
/// Wrong.
#[derive(Debug, thiserror::Error)]
#[error("wrong")]
pub struct CheckError;
/// Checks.
pub fn check(_m: &Module) -> Result<(), CheckError> {
    Ok(())
}
