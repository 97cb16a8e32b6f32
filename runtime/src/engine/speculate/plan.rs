//! The rows of a verify call.

use crate::engine::Row;

/// Another guess at a depth of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Side {
    /// Depth of the guess it stands in for, from 1.
    pub(crate) depth: usize,
    /// Its id.
    pub(crate) id: u32,
    /// 0 for the drafter's second choice at the depth, 1 for the third.
    pub(crate) rank: usize,
}

/// A verify call: row `i` writes slot `offset + i`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) offset: usize,
    pub(crate) rows: Vec<Row>,
    /// Row of the last token of the text; guess `k` is in row `root + k`.
    pub(crate) root: usize,
    /// Ids of the chain.
    pub(crate) chain: Vec<u32>,
    /// Sides, in the rows after the chain.
    pub(crate) sides: Vec<Side>,
}

impl Plan {
    /// `text[offset..]`, then the chain, then the sides, at most 64 rows together. A
    /// side may be one deeper than the chain.
    pub(crate) fn new(text: &[u32], offset: usize, chain: Vec<u32>, sides: Vec<Side>) -> Self {
        let root = text.len() - 1 - offset;
        let mut ids = text[offset..].to_vec();
        ids.extend(&chain);
        let mut rows = Row::chain(&ids, offset);
        for side in &sides {
            let before = root + side.depth;
            rows.push(Row {
                id: side.id,
                position: (offset + before) as u32,
                sees: ((1 << before) - 1) | (1 << rows.len()),
            });
        }
        Self {
            offset,
            rows,
            root,
            chain,
            sides,
        }
    }

    /// The row of side `i`.
    pub(crate) fn side_row(&self, i: usize) -> usize {
        self.root + self.chain.len() + 1 + i
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_those_of_the_specification() {
        // VERIFY.md, section 3: root at position 102, two replays, seven guesses, six
        // sides; a side at depth 3 has position 105 and sees slots 0..=104 and its own.
        let text: Vec<u32> = (0..103).collect();
        let chain: Vec<u32> = (200..207).collect();
        let sides = [3, 1, 2, 4, 5, 6].map(|depth| Side {
            depth,
            id: 300 + depth as u32,
            rank: 0,
        });
        let plan = Plan::new(&text, 100, chain, sides.to_vec());
        assert_eq!((plan.rows.len(), plan.root), (16, 2));
        let ids: Vec<u32> = plan.rows.iter().map(|r| r.id).collect();
        assert_eq!(ids[..4], [100, 101, 102, 200]);
        assert_eq!(ids[9..11], [206, 303]);
        let row = plan.rows[10];
        assert_eq!((row.id, row.position), (303, 105));
        assert_eq!(row.sees, 0b100_0001_1111);
        assert_eq!(plan.side_row(0), 10);
        assert_eq!(plan.rows[9].position, 109);
        assert_eq!(plan.rows[9].sees, 0b11_1111_1111);
    }
}
