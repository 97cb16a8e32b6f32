//! What a manifest must hold together: everything that names or counts something else in
//! it is compared with that.

use super::{Drafter, MANIFEST_VERSION, Manifest, is_relative};

impl Manifest {
    pub(super) fn check(&self) -> Result<(), String> {
        if self.format != MANIFEST_VERSION {
            return Err(format!(
                "manifest version {}, this program reads {MANIFEST_VERSION}",
                self.format
            ));
        }
        let paths = self.chunks.iter().map(|c| &c.path);
        for path in paths.chain([&self.embedding.path]).chain(self.files.keys()) {
            if !is_relative(path) {
                return Err(format!("`{path}` does not stay inside the folder"));
            }
        }
        let m = &self.model;
        for (what, n) in [
            ("hidden", m.hidden),
            ("layers", m.layers),
            ("vocab", m.vocab),
            ("head_dim", m.head_dim),
            ("kv_channels", m.kv_channels),
            ("offset_multiple", self.offset_multiple),
        ] {
            if n == 0 || n > 1 << 24 {
                return Err(format!("`{what}` is {n}"));
            }
        }
        if self.embedding.shape != [m.vocab, m.hidden] {
            return Err(format!(
                "embedding of shape {:?}, expected [{}, {}]",
                self.embedding.shape, m.vocab, m.hidden
            ));
        }
        if m.tokenizer_vocab > m.vocab {
            return Err(format!(
                "tokenizer of {} ids for {} rows",
                m.tokenizer_vocab, m.vocab
            ));
        }
        if self.rope.inv_freq.len() * 2 != m.head_dim {
            return Err(format!(
                "{} rotary frequencies for heads of width {}",
                self.rope.inv_freq.len(),
                m.head_dim
            ));
        }
        for (what, sizes) in [("contexts", &self.contexts), ("widths", &self.widths)] {
            let ascending = sizes.windows(2).all(|w| w[0] < w[1]);
            let sane = sizes
                .iter()
                .all(|&n| n > 0 && n <= 1 << 20 && n % self.offset_multiple == 0);
            if sizes.is_empty() || !ascending || !sane {
                return Err(format!("`{what}` is {sizes:?}"));
            }
        }
        self.check_chunks()?;
        self.drafter.as_ref().map_or(Ok(()), |d| {
            d.check(self).map_err(|e| format!("drafter: {e}"))
        })
    }

    fn check_chunks(&self) -> Result<(), String> {
        let mut next = 0;
        for (i, chunk) in self.chunks.iter().enumerate() {
            let [first, end] = chunk.layers;
            if first != next || end <= first {
                return Err(format!(
                    "chunk {i} holds layers {first}..{end}, expected to start at {next}"
                ));
            }
            next = end;
            let last = i + 1 == self.chunks.len();
            if chunk.head != last {
                return Err(format!("chunk {i}: `head` is {}", chunk.head));
            }
            for &context in &self.contexts {
                for &width in &self.widths {
                    if chunk.function(context, width).is_none() {
                        return Err(format!(
                            "chunk {i} has no function for context {context}, width {width}"
                        ));
                    }
                }
            }
        }
        if next != self.model.layers {
            return Err(format!(
                "chunks end at layer {next}, expected {}",
                self.model.layers
            ));
        }
        Ok(())
    }
}

impl Drafter {
    fn check(&self, folder: &Manifest) -> Result<(), String> {
        for path in [&self.path, &self.embedding.path] {
            if !is_relative(path) {
                return Err(format!("`{path}` does not stay inside the folder"));
            }
        }
        for (what, n) in [
            ("block", self.block),
            ("guesses", self.guesses),
            ("rows", self.rows),
            ("prefill_rows", self.prefill_rows),
            ("layers", self.layers),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
        ] {
            if n == 0 || n > 1 << 12 {
                return Err(format!("`{what}` is {n}"));
            }
        }
        if self.guesses > self.block {
            return Err(format!(
                "{} guesses of a block of {}",
                self.guesses, self.block
            ));
        }
        let widest = self.rows.max(self.prefill_rows);
        if self.spare_slots < widest || self.spare_slots > 1 << 12 {
            return Err(format!(
                "{} spare slots for calls of {widest} rows",
                self.spare_slots
            ));
        }
        let m = &folder.model;
        if self.mask_id as usize >= m.vocab {
            return Err(format!("mask id {} of {} rows", self.mask_id, m.vocab));
        }
        if self.embedding.shape != [m.vocab, m.hidden] {
            let shape = self.embedding.shape;
            return Err(format!("embedding of shape {shape:?}"));
        }
        if self.rope.inv_freq.len() * 2 != self.head_dim {
            return Err(format!(
                "{} rotary frequencies for heads of width {}",
                self.rope.inv_freq.len(),
                self.head_dim
            ));
        }
        let ascending = |v: &[usize]| !v.is_empty() && v.windows(2).all(|w| w[0] < w[1]);
        if !ascending(&self.contexts) || self.contexts.iter().any(|&c| c == 0 || c > 1 << 20) {
            return Err(format!("`contexts` is {:?}", self.contexts));
        }
        let exported = |t: &usize| folder.chunks.iter().any(|c| c.taps.contains(t));
        if !ascending(&self.taps) || !self.taps.iter().all(exported) {
            return Err(format!(
                "it reads the layers {:?}, not all of which the chunks give out",
                self.taps
            ));
        }
        Ok(())
    }
}
