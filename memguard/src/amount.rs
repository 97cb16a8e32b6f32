//! Amounts of memory as people write and read them.

use std::fmt;
use std::str::FromStr;

/// An amount of memory: absolute, or relative to all memory the job may use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// Bytes.
    Bytes(u64),
    /// Percent of the total, 0 to 100.
    Percent(f64),
}

impl Amount {
    /// The amount in bytes when the whole is `total` bytes.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (total as f64 * percent / 100.0) as u64,
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => f.write_str(&human_bytes(*bytes)),
            Self::Percent(percent) => write!(f, "{percent} %"),
        }
    }
}

/// Why a text is not an [`Amount`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseAmountError {
    /// No number in front.
    #[error("`{0}` is not an amount of memory, expected a form like `300M`, `6G` or `6%`")]
    NotANumber(String),
    /// A suffix that is no unit.
    #[error("unknown unit `{unit}` in `{text}`, expected one of K, M, G, T, KB, MB, GB, TB or %")]
    Unit {
        /// The whole text.
        text: String,
        /// Its suffix.
        unit: String,
    },
    /// More than 2^64 bytes, or a percentage above 100.
    #[error("`{0}` is too large")]
    TooLarge(String),
}

/// `K`, `M`, `G`, `T` (also `KiB`...) are powers of 1024 as in most Unix tools;
/// `KB`, `MB`, `GB`, `TB` are powers of 1000; a bare number is bytes.
impl FromStr for Amount {
    type Err = ParseAmountError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let trimmed = text.trim();
        let digits = trimmed
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let number: f64 = number
            .parse()
            .map_err(|_| ParseAmountError::NotANumber(text.to_owned()))?;
        let unit = unit.trim();
        let scale = match unit.to_ascii_lowercase().as_str() {
            "%" if number <= 100.0 => return Ok(Self::Percent(number)),
            "%" => return Err(ParseAmountError::TooLarge(text.to_owned())),
            "" | "b" => 1.0,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1024f64.powi(2),
            "g" | "gib" => 1024f64.powi(3),
            "t" | "tib" => 1024f64.powi(4),
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            _ => {
                return Err(ParseAmountError::Unit {
                    text: text.to_owned(),
                    unit: unit.to_owned(),
                });
            }
        };
        let bytes = number * scale;
        if bytes >= u64::MAX as f64 {
            return Err(ParseAmountError::TooLarge(text.to_owned()));
        }
        Ok(Self::Bytes(bytes as u64))
    }
}

/// `bytes` with a binary unit and three significant digits, `1.50 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        // 999.5 and more would print as four digits.
        if value < 999.5 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    let decimals = match value {
        _ if unit == "B" => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_as_unix_tools_read_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("300M", 300 << 20),
            ("6G", 6 << 30),
            ("6GiB", 6 << 30),
            ("6 gib", 6 << 30),
            ("6GB", 6_000_000_000),
            ("1.5g", 3 << 29),
            ("2T", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Amount::Bytes(bytes)), "{text}");
        }
        assert_eq!("6%".parse(), Ok(Amount::Percent(6.0)));
        assert_eq!(Amount::Percent(6.0).of(200), 12);
    }

    #[test]
    fn what_is_no_amount_is_refused_with_the_reason() {
        for (text, part) in [
            ("", "not an amount"),
            ("-1", "not an amount"),
            ("G", "not an amount"),
            ("1.2.3", "not an amount"),
            ("6X", "unknown unit `X`"),
            ("101%", "too large"),
            ("99999999999T", "too large"),
        ] {
            let message = text.parse::<Amount>().unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn bytes_are_printed_with_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.98 KiB"),
            (1536, "1.50 KiB"),
            (300 << 20, "300 MiB"),
            (6 << 30, "6.00 GiB"),
            (25_276_502_016, "23.5 GiB"),
        ] {
            assert_eq!(human_bytes(bytes), text);
        }
    }
}
