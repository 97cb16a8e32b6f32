//! Accepted tokens per cycle by domain, in the decode loop: what `reference/accepted.py`
//! says of the same prompts.
//!
//! ```text
//! accepted FOLDER [PROMPTS_PER_DOMAIN] [NEW_TOKENS]
//! ```
//!
//! A line per prompt comes first: cycles, accepted tokens, and a hash of the text, since
//! means compare where the texts are equal. The folder has a drafter. `accepted.py` with the store that the folder was made from
//! has the same weights.

#![allow(clippy::print_stdout, reason = "it reports to a terminal")]

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;

use anemone_runtime::engine::{DrafterProgram, Engine, Options, ProgramDrafter, Session};
use anemone_tests::drafts::prompts;
use sha2::{Digest, Sha256};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let usage = "usage: accepted FOLDER [PROMPTS_PER_DOMAIN] [NEW_TOKENS]";
    let folder = Path::new(args.first().ok_or(usage)?);
    let number = |i: usize, default| args.get(i).map_or(Ok(default), |n| n.parse());
    let (per_domain, new_tokens) = (number(1, 20)?, number(2, 256)?);
    let engine = Engine::open(folder, 2)?;
    let drafter = DrafterProgram::open(folder, 2)?.ok_or("the folder has no drafter")?;
    let prompts = prompts(&engine, per_domain);
    for (name, sides) in [("chain", false), ("tree", true)] {
        let options = Options {
            max_tokens: new_tokens,
            adapt: false,
            stop: false,
            sides,
            ..Options::default()
        };
        for (domain, prompts) in ["code", "docs", "chat"]
            .iter()
            .zip(prompts.chunks(per_domain))
        {
            let (mut cycles, mut accepted, mut hits) = (0, 0, 0);
            for (n, prompt) in prompts.iter().enumerate() {
                let draft = Box::new(ProgramDrafter::new(&drafter));
                let mut session = Session::new(&engine, Some(draft));
                let answer =
                    session.answer(&engine, prompt, &options, |_| ControlFlow::Continue(()))?;
                let bytes = answer.ids.iter().flat_map(|id| id.to_le_bytes());
                let text = Sha256::digest(bytes.collect::<Vec<u8>>());
                let s = &answer.statistics;
                println!(
                    "{name} {domain} {n} {:02x}{:02x}{:02x}{:02x}: {} {}",
                    text[0], text[1], text[2], text[3], s.cycles, s.accepted
                );
                cycles += s.cycles;
                accepted += s.accepted;
                hits += s.side_hits;
            }
            let mean = accepted as f64 / cycles as f64;
            println!("{name} {domain}: {mean:.3} ({cycles} cycles, {hits} side hits)");
        }
    }
    Ok(())
}
