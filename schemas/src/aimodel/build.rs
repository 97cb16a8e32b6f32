//! Building graphs.
