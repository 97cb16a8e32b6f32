//! Every operation the builder knows, judged by Apple's runtime: each case is a
//! function of one program, its result compared with a formula.

mod compression;
mod compute;
mod elementwise;
mod layout;
mod suite;
