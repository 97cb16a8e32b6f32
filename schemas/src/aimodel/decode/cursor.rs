//! Reading bytes one after another, with the offset at hand.

use super::{DecodeError, Problem, Result};
use crate::aimodel::ids::{self, section};
use crate::aimodel::limits::MAX_ALIGNMENT;
use crate::aimodel::varint;

/// A window of the file. Offsets are the file's.
#[derive(Clone)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
    /// End of the window, at most the length of the file.
    end: usize,
}

/// A section: its kind and a window of its payload.
pub(super) struct Section<'a> {
    pub(super) id: u8,
    pub(super) offset: usize,
    pub(super) payload: Cursor<'a>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            pos: 0,
            end: bytes.len(),
        }
    }

    pub(super) fn offset(&self) -> usize {
        self.pos
    }

    pub(super) fn left(&self) -> usize {
        self.end - self.pos
    }

    pub(super) fn error(&self, problem: Problem) -> DecodeError {
        DecodeError {
            offset: self.pos as u64,
            problem,
        }
    }

    pub(super) fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        if n > self.left() {
            return Err(self.error(Problem::Truncated {
                needed: n as u64,
                left: self.left() as u64,
            }));
        }
        let taken = &self.bytes[self.pos..self.pos + n];
        self.pos += n;
        Ok(taken)
    }

    /// A window of the next `n` bytes, which are passed over.
    pub(super) fn window(&mut self, n: usize) -> Result<Self> {
        let pos = self.pos;
        self.take(n)?;
        Ok(Self {
            bytes: self.bytes,
            pos,
            end: self.pos,
        })
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    pub(super) fn number(&mut self) -> Result<u64> {
        let first = *self.clone().take(1)?.first().expect("one byte");
        Ok(varint::get(self.take(varint::len_of(first))?))
    }

    pub(super) fn signed(&mut self) -> Result<i64> {
        Ok(varint::unfold(self.number()?))
    }

    /// A number and the flag in its lowest bit.
    pub(super) fn flagged(&mut self) -> Result<(u64, bool)> {
        let n = self.number()?;
        Ok((n >> 1, n & 1 == 1))
    }

    /// A length in bytes; what is left bounds it.
    pub(super) fn len(&mut self) -> Result<usize> {
        let at = self.clone();
        let n = self.number()?;
        at.fits(n, self.left())
    }

    /// How many entries follow; each takes at least a byte, so what is left
    /// bounds it.
    pub(super) fn count(&mut self) -> Result<usize> {
        self.len()
    }

    /// `n` as a count of things that take at least a byte each of what is left.
    pub(super) fn count_of(&self, n: u64) -> Result<usize> {
        self.fits(n, self.left())
    }

    fn fits(&self, n: u64, left: usize) -> Result<usize> {
        match usize::try_from(n) {
            Ok(n) if n <= left => Ok(n),
            _ => Err(self.error(Problem::Truncated {
                needed: n,
                left: left as u64,
            })),
        }
    }

    /// A position in a table of `count` entries.
    pub(super) fn index(&mut self, what: &'static str, count: usize) -> Result<usize> {
        let at = self.clone();
        let n = self.number()?;
        at.checked_index(n, what, count)
    }

    pub(super) fn checked_index(&self, n: u64, what: &'static str, count: usize) -> Result<usize> {
        match usize::try_from(n) {
            Ok(i) if i < count => Ok(i),
            _ => Err(self.error(Problem::Index {
                what,
                index: n,
                count: count as u64,
            })),
        }
    }

    pub(super) fn version(&mut self, what: &'static str, expected: u64) -> Result<()> {
        let at = self.clone();
        let found = self.number()?;
        if found == expected {
            return Ok(());
        }
        Err(at.error(Problem::Version {
            what,
            found,
            expected,
        }))
    }

    /// Bytes up to a zero, which is passed over.
    pub(super) fn c_string(&mut self) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.pos..self.end];
        match rest.iter().position(|&b| b == 0) {
            Some(len) => Ok(&self.take(len + 1)?[..len]),
            None => Err(self.error(Problem::Truncated {
                needed: self.left() as u64 + 1,
                left: self.left() as u64,
            })),
        }
    }

    /// Passes over the padding before data aligned in the file.
    pub(super) fn align(&mut self, alignment: u64) -> Result<()> {
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(self.error(Problem::Malformed(format!(
                "alignment {alignment} is not a power of two up to {MAX_ALIGNMENT}"
            ))));
        }
        let padded = (self.pos as u64).next_multiple_of(alignment);
        for _ in self.pos as u64..padded {
            if self.byte()? != ids::PADDING {
                self.pos -= 1;
                return Err(self.error(Problem::Malformed(format!(
                    "the padding before aligned data is not {:#04x}",
                    ids::PADDING
                ))));
            }
        }
        Ok(())
    }

    pub(super) fn section(&mut self) -> Result<Section<'a>> {
        let offset = self.pos;
        let id = self.byte()?;
        let at = self.clone();
        let len = self.number()?;
        if id & section::ALIGNED != 0 {
            let alignment = self.number()?;
            self.align(alignment)?;
        }
        let len = at.fits(len, self.left())?;
        Ok(Section {
            id: id & !section::ALIGNED,
            offset,
            payload: self.window(len)?,
        })
    }

    pub(super) fn end(&self, what: &'static str) -> Result<()> {
        if self.left() == 0 {
            return Ok(());
        }
        Err(self.error(Problem::Trailing {
            what,
            left: self.left() as u64,
        }))
    }
}
