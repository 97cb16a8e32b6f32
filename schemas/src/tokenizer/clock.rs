//! Dates for chat templates: Python's `strftime`, in UTC, for the directives that
//! templates use.

use std::fmt::Write as _;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// Formats a time. `Err` is a directive that is not known.
pub(super) fn strftime(unix_seconds: i64, format: &str) -> Result<String, String> {
    let days = unix_seconds.div_euclid(86_400);
    let second_of_day = unix_seconds.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (
        second_of_day / 3600,
        second_of_day / 60 % 60,
        second_of_day % 60,
    );
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[(days + 4).rem_euclid(7) as usize];
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = match chars.next() {
            // glibc's flag for no padding.
            Some('-') => format!("-{}", chars.next().unwrap_or_default()),
            Some(c) => c.to_string(),
            None => String::new(),
        };
        let _ = match directive.as_str() {
            "Y" => write!(out, "{year}"),
            "y" => write!(out, "{:02}", year.rem_euclid(100)),
            "m" => write!(out, "{month:02}"),
            "-m" => write!(out, "{month}"),
            "d" => write!(out, "{day:02}"),
            "-d" => write!(out, "{day}"),
            "e" => write!(out, "{day:2}"),
            "j" => write!(out, "{:03}", days - days_from_civil(year, 1, 1) + 1),
            "B" => write!(out, "{month_name}"),
            "b" | "h" => write!(out, "{}", &month_name[..3]),
            "A" => write!(out, "{day_name}"),
            "a" => write!(out, "{}", &day_name[..3]),
            "H" => write!(out, "{hour:02}"),
            "-H" => write!(out, "{hour}"),
            "I" => write!(out, "{hour12:02}"),
            "-I" => write!(out, "{hour12}"),
            "p" => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            "M" => write!(out, "{minute:02}"),
            "S" => write!(out, "{second:02}"),
            "F" => write!(out, "{year}-{month:02}-{day:02}"),
            "T" => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            "Z" => write!(out, "UTC"),
            "z" => write!(out, "+0000"),
            "%" => write!(out, "%"),
            other => return Err(format!("%{other}")),
        };
    }
    Ok(out)
}

/// Year, month and day of a day number. After H. Hinnant, "chrono-Compatible
/// Low-Level Date Algorithms": years start in March, so that the leap day is last,
/// and repeat every 400 years, 146097 days.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = (shifted_month + 2) % 12 + 1;
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_pythons() {
        // datetime.fromtimestamp(t, timezone.utc).strftime(...)
        let format = "%Y-%m-%d %H:%M:%S %j %A %b %I%p";
        for (time, text) in [
            (0, "1970-01-01 00:00:00 001 Thursday Jan 12AM"),
            (951_782_400, "2000-02-29 00:00:00 060 Tuesday Feb 12AM"),
            (1_735_689_599, "2024-12-31 23:59:59 366 Tuesday Dec 11PM"),
            (-1, "1969-12-31 23:59:59 365 Wednesday Dec 11PM"),
        ] {
            assert_eq!(strftime(time, format).unwrap(), text);
        }
        assert_eq!(strftime(0, "%q").unwrap_err(), "%q");
        assert_eq!(strftime(0, "100%").unwrap_err(), "%");
    }

    #[test]
    fn every_day_of_800_years_goes_there_and_back() {
        for days in -146_097..146_097 {
            let (year, month, day) = civil(days);
            assert_eq!(days_from_civil(year, month, day), days);
        }
    }
}
