//! From the choices of a call to the tokens they are worth.

use super::plan::Plan;

/// What a verify call gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    /// New tokens: right guesses, then the target's own choice.
    pub(crate) new: Vec<u32>,
    /// Rows that hold text now: the root, right guesses, the side.
    pub(crate) used: Vec<usize>,
    /// Guesses of the chain that were right.
    pub(crate) right: usize,
    /// The side that was right, by its place in the plan.
    pub(crate) side: Option<usize>,
    /// What the target chose in the side's row: most likely the token after the new
    /// ones.
    pub(crate) presumed: Option<u32>,
}

/// Walks along the chain while `chosen`, the target's choice in every row, is the next
/// guess. If a side stands where it ends, the side's row tells what comes after.
pub(crate) fn walk(plan: &Plan, chosen: &[u32]) -> Walk {
    let mut row = plan.root;
    let mut walk = Walk {
        new: Vec::new(),
        used: vec![row],
        right: 0,
        side: None,
        presumed: None,
    };
    for &guess in &plan.chain {
        if chosen[row] != guess {
            break;
        }
        row += 1;
        walk.new.push(guess);
        walk.used.push(row);
        walk.right += 1;
    }
    let wanted = chosen[row];
    walk.new.push(wanted);
    let hit = |s: &super::plan::Side| s.depth == walk.right + 1 && s.id == wanted;
    walk.side = plan.sides.iter().position(hit);
    if let Some(side) = walk.side {
        let row = plan.side_row(side);
        walk.used.push(row);
        walk.presumed = Some(chosen[row]);
    }
    walk
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::speculate::plan::Side;

    /// Two replays, root 9, guesses 1 2 3, sides 7 at depth 2 and 8 at depth 3.
    fn plan() -> Plan {
        let side = |depth, id| Side { depth, id, rank: 0 };
        Plan::new(&[0, 0, 9], 0, vec![1, 2, 3], vec![side(2, 7), side(3, 8)])
    }

    #[track_caller]
    fn check(chosen: [u32; 8], new: &[u32], used: &[usize], side: Option<(usize, u32)>) {
        let w = walk(&plan(), &chosen);
        assert_eq!((&w.new[..], &w.used[..]), (new, used));
        assert_eq!(w.right, new.len() - 1);
        assert_eq!(w.side.zip(w.presumed), side);
    }

    #[test]
    fn a_walk_ends_at_the_first_wrong_guess() {
        check([0, 0, 5, 2, 3, 4, 0, 0], &[5], &[2], None);
        check([0, 0, 1, 6, 3, 4, 0, 0], &[1, 6], &[2, 3], None);
        // A side of another depth does not count.
        check([0, 0, 1, 8, 3, 4, 0, 0], &[1, 8], &[2, 3], None);
    }

    #[test]
    fn a_full_walk_gives_one_more_than_was_guessed() {
        check([0, 0, 1, 2, 3, 4, 0, 0], &[1, 2, 3, 4], &[2, 3, 4, 5], None);
    }

    #[test]
    fn a_side_hit_tells_what_comes_after() {
        check(
            [0, 0, 1, 7, 0, 0, 55, 66],
            &[1, 7],
            &[2, 3, 6],
            Some((0, 55)),
        );
        check(
            [0, 0, 1, 2, 8, 0, 55, 66],
            &[1, 2, 8],
            &[2, 3, 4, 7],
            Some((1, 66)),
        );
    }
}
