//! Attributes and types.
//!
//! Entries may refer to entries before or after them, so they are resolved depth
//! first with an explicit stack: an entry that refers to unresolved ones is put
//! back until they are done, then read again. One that is met while it waits
//! contains itself.

mod parse;

use self::parse::{Made, Parser};
use super::cursor::Cursor;
use super::tables::Tables;
use super::{Problem, Result};
use crate::aimodel::ir::{AttrId, BlobId, Module, TypeId};
use crate::aimodel::limits::MAX_ENTRY_DEPTH;

/// The handles of all attributes and types, by their numbers in the file.
pub(super) struct Entries {
    attrs: Vec<AttrId>,
    types: Vec<TypeId>,
}

impl Entries {
    pub(super) fn attr(&self, c: &mut Cursor) -> Result<AttrId> {
        Ok(self.attrs[c.index("attribute", self.attrs.len())?])
    }

    /// Like [`Self::attr`], of a number already read at `at`.
    pub(super) fn attr_at(&self, at: &Cursor, n: u64) -> Result<AttrId> {
        Ok(self.attrs[at.checked_index(n, "attribute", self.attrs.len())?])
    }

    pub(super) fn ty(&self, c: &mut Cursor) -> Result<TypeId> {
        Ok(self.types[c.index("type", self.types.len())?])
    }

    /// Like [`Self::ty`], of a number already read at `at`.
    pub(super) fn ty_at(&self, at: &Cursor, n: u64) -> Result<TypeId> {
        Ok(self.types[at.checked_index(n, "type", self.types.len())?])
    }
}

/// An entry of one of the two tables.
#[derive(Clone, Copy)]
enum Node {
    Attr(usize),
    Type(usize),
}

#[derive(Clone, Copy)]
enum State {
    New,
    /// Waits for the entries it refers to.
    Open,
    /// The handle in the module, and the longest chain of references below.
    Done {
        handle: u32,
        depth: u32,
    },
}

struct States {
    attrs: Vec<State>,
    types: Vec<State>,
}

impl States {
    fn get(&self, node: Node) -> State {
        match node {
            Node::Attr(i) => self.attrs[i],
            Node::Type(i) => self.types[i],
        }
    }

    fn set(&mut self, node: Node, state: State) {
        match node {
            Node::Attr(i) => self.attrs[i] = state,
            Node::Type(i) => self.types[i] = state,
        }
    }
}

pub(super) fn resolve(tables: &Tables, blobs: &[BlobId], m: &mut Module) -> Result<Entries> {
    let mut states = States {
        attrs: vec![State::New; tables.attrs.len()],
        types: vec![State::New; tables.types.len()],
    };
    let types = (0..tables.types.len()).map(Node::Type);
    let attrs = (0..tables.attrs.len()).map(Node::Attr);
    // Roots last first, so that entries become handles in the order of the file.
    let mut stack: Vec<Node> = types.chain(attrs).rev().collect();
    while let Some(&node) = stack.last() {
        if matches!(states.get(node), State::Done { .. }) {
            stack.pop();
            continue;
        }
        let cursor = match node {
            Node::Attr(i) => &tables.attrs[i],
            Node::Type(i) => &tables.types[i],
        };
        let mut parser = Parser::new(tables, blobs, m, &states);
        let made = parser.entry(node, cursor.clone())?;
        let met = parser.into_met();
        let (mut depth, mut waits) = (0, false);
        states.set(node, State::Open);
        for child in met {
            match states.get(child) {
                State::Done { depth: below, .. } => depth = depth.max(below + 1),
                State::New => {
                    waits = true;
                    stack.push(child);
                }
                State::Open => {
                    return Err(cursor.error(Problem::Cycle(match node {
                        Node::Attr(_) => "an attribute",
                        Node::Type(_) => "a type",
                    })));
                }
            }
        }
        if waits {
            continue;
        }
        if depth > MAX_ENTRY_DEPTH {
            return Err(cursor.error(Problem::TooLarge {
                what: "the depth of nested attributes and types",
                value: u64::from(depth),
                max: u64::from(MAX_ENTRY_DEPTH),
            }));
        }
        let handle = match made {
            Made::Attr(attr) => m.add_attr(attr).0,
            Made::Type(ty) => m.add_type(ty).0,
        };
        states.set(node, State::Done { handle, depth });
        stack.pop();
    }
    let handles = |states: Vec<State>| {
        states.into_iter().map(|s| match s {
            State::Done { handle, .. } => handle,
            State::New | State::Open => unreachable!("every entry was a root"),
        })
    };
    Ok(Entries {
        attrs: handles(states.attrs).map(AttrId).collect(),
        types: handles(states.types).map(TypeId).collect(),
    })
}
