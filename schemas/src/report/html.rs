//! The report as one HTML page that needs nothing else: tables, and plots drawn as SVG.

use std::fmt::Write;

use super::{Measured, QualityReport, SetQuality, Student, plots};

/// Colours of text sets, in their order; readable for the colour-blind (Okabe and Ito, 2008).
const COLOURS: [&str; 6] = [
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9",
];

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;\
padding:0 1rem;color:#222}table{border-collapse:collapse;font-size:13px}\
td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:right}\
td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}\
text{font:11px system-ui,sans-serif;fill:#444}figcaption{color:#555;font-size:13px}\
.key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}\
.n{white-space:nowrap}";

impl QualityReport {
    /// The page.
    pub fn html(&self) -> String {
        let mut out = format!(
            "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\">\
             <title>Quality report</title><style>{STYLE}</style>\
             <h1>How far from the original</h1>\
             <p>KL divergence of next-token distributions from the bf16 model's, in nats per \
             token, over the whole vocabulary of the tokenizer. Measured by {}.</p>",
            escape(&self.producer)
        );
        out.push_str("<p>Text sets:");
        for (at, set) in self.text.iter().enumerate() {
            let _ = write!(
                out,
                "<span class=\"key\" style=\"background:{}\"></span>{} ({} tokens in {} windows)",
                colour(at),
                escape(&set.name),
                set.tokens,
                set.windows
            );
        }
        out.push_str("</p>");
        self.bars(&mut out);
        self.table(&mut out);
        for student in &self.students {
            let _ = write!(
                out,
                "<h2>{}, {}</h2>",
                escape(&student.name),
                run_on(student.measured)
            );
            windows(&mut out, student);
            plots::student(&mut out, student);
        }
        out.push_str("</html>\n");
        out
    }

    /// Mean KL of every student with its interval.
    fn bars(&self, out: &mut String) {
        let upper = |q: &SetQuality| q.kl_mean + q.kl_ci95;
        let all = self.students.iter().flat_map(|s| &s.sets);
        let top = all.map(upper).fold(1e-9, f64::max);
        let sets = self.text.len().max(1);
        let row = 14 * sets + 24;
        let height = row * self.students.len() + 10;
        let _ = write!(
            out,
            "<figure><svg viewBox=\"0 0 900 {height}\" role=\"img\"><title>Mean KL</title>"
        );
        for (at, student) in self.students.iter().enumerate() {
            let y = at * row + 14;
            let _ = write!(
                out,
                "<text x=\"0\" y=\"{y}\">{}, {}</text>",
                escape(&student.name),
                run_on(student.measured)
            );
            for (set, q) in student.sets.iter().enumerate() {
                let y = y + 5 + 14 * set;
                let x = |kl: f64| 700.0 * kl / top;
                let (mean, low, high) = (x(q.kl_mean), x(q.kl_mean - q.kl_ci95), x(upper(q)));
                let _ = write!(
                    out,
                    "<rect x=\"0\" y=\"{y}\" width=\"{mean:.1}\" height=\"11\" fill=\"{}\"/>\
                     <path d=\"M{low:.1} {middle}H{high:.1}\" stroke=\"#222\"/>\
                     <text x=\"{after:.1}\" y=\"{base}\">{:.4} ± {:.4}</text>",
                    colour(set),
                    q.kl_mean,
                    q.kl_ci95,
                    middle = y + 5,
                    after = high + 6.0,
                    base = y + 10,
                );
            }
        }
        out.push_str(
            "</svg><figcaption>Mean KL by text set; the line is the 95% interval.\
             </figcaption></figure>",
        );
    }

    fn table(&self, out: &mut String) {
        out.push_str(
            "<table><tr><th>weights</th><th>text</th><th>tokens</th><th>mean</th>\
             <th>median</th><th>90%</th><th>99%</th><th>99.9%</th><th>max</th><th>top-1</th>\
             <th>perplexity</th><th>of the original</th></tr>",
        );
        for student in &self.students {
            for q in &student.sets {
                let _ = write!(
                    out,
                    "<tr><td>{}, {}</td><td>{}</td><td>{}</td><td>{:.4} ± {:.4}</td>\
                     <td>{:.4}</td><td>{:.3}</td><td>{:.3}</td><td>{:.3}</td><td>{:.2}</td>\
                     <td>{:.1}%</td><td>{}</td><td>{}</td></tr>",
                    escape(&student.name),
                    run_on(student.measured),
                    escape(&q.set),
                    q.tokens,
                    q.kl_mean,
                    q.kl_ci95,
                    q.kl_median,
                    q.kl_p90,
                    q.kl_p99,
                    q.kl_p999,
                    q.kl_max,
                    100.0 * q.top1,
                    perplexity(q.ppl_student),
                    perplexity(q.ppl_teacher),
                );
            }
        }
        out.push_str("</table>");
    }
}

/// KL of every window of a student, in the order of the text.
fn windows(out: &mut String, student: &Student) {
    let all = student.sets.iter().flat_map(|q| &q.kl_windows);
    let (count, top) = all.fold((0usize, 1e-9f64), |(n, top), kl| (n + 1, top.max(*kl)));
    if count == 0 {
        return;
    }
    let _ = write!(
        out,
        "<figure><svg viewBox=\"0 0 900 170\" role=\"img\"><title>KL by window</title>\
         <path d=\"M40 10V150H890\" fill=\"none\" stroke=\"#999\"/>\
         <text x=\"0\" y=\"14\">{top:.3}</text><text x=\"20\" y=\"154\">0</text>"
    );
    let mut at = 0;
    for (set, q) in student.sets.iter().enumerate() {
        for kl in &q.kl_windows {
            let x = 45.0 + 840.0 * at as f64 / count as f64;
            let y = 150.0 - 140.0 * kl / top;
            let _ = write!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{}\"/>",
                colour(set)
            );
            at += 1;
        }
    }
    out.push_str(
        "</svg><figcaption>Mean KL of each window, in the order of the text.</figcaption></figure>",
    );
}

pub(super) fn colour(set: usize) -> &'static str {
    COLOURS[set % COLOURS.len()]
}

fn run_on(measured: Measured) -> &'static str {
    match measured {
        Measured::Simulator => "simulator",
        Measured::ShippedPrograms => "shipped programs",
    }
}

fn perplexity(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_string(), |v| format!("{v:.2}"))
}

pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::{
        Choice, MatrixQuality, PositionKl, REPORT_VERSION, TableSample, TextSet, WorstContext,
    };
    use super::*;

    #[test]
    fn a_page_shows_every_student_and_set_and_loads_nothing() {
        let choice = |token: &str, probability| Choice {
            token: token.into(),
            probability,
        };
        let set = SetQuality {
            set: "docs".into(),
            tokens: 6,
            kl_mean: 0.0625,
            kl_ci95: 0.01,
            kl_windows: vec![0.05, 0.075],
            kl_median: 0.03,
            kl_p90: 0.1,
            kl_p99: 0.2,
            kl_p999: 0.3,
            kl_max: 1.0,
            top1: 0.9,
            ppl_teacher: Some(8.0),
            ppl_student: None,
            kl_positions: vec![
                PositionKl {
                    from: 0,
                    to: 1,
                    tokens: 2,
                    kl_mean: 0.125,
                },
                PositionKl {
                    from: 1,
                    to: 2,
                    tokens: 2,
                    kl_mean: 0.03125,
                },
            ],
            worst: vec![WorstContext {
                window: 1,
                position: 2,
                kl: 1.0,
                context: "if a <b".into(),
                next: Some(" &&".into()),
                teacher: vec![choice(" &&", 0.75)],
                student: vec![choice("\n", 0.5)],
            }],
        };
        let student = |name: &str, measured| Student {
            name: name.into(),
            measured,
            sets: vec![set.clone()],
            layer_errors: vec![0.01, 0.02],
            matrices: vec![MatrixQuality {
                name: "model.layers.0.<q>".into(),
                bits: 4,
                method: "gptq".into(),
                plain_error: 0.1,
                weighted_error: 0.25,
                fallback: Some("not positive definite".into()),
            }],
            tables: vec![TableSample {
                matrix: "model.layers.0.<q>".into(),
                group: 3,
                values: vec![-1.0, 0.5],
            }],
        };
        let report = QualityReport {
            format: REPORT_VERSION,
            producer: "test".into(),
            teacher: String::new(),
            text: vec![TextSet {
                name: "docs".into(),
                windows: 2,
                tokens: 6,
                sha256: String::new(),
            }],
            students: vec![
                student("<b> & co", Measured::Simulator),
                student("lut4", Measured::ShippedPrograms),
            ],
        };
        let page = report.html();
        assert!(page.contains("&lt;b&gt; &amp; co, simulator"));
        assert!(page.contains("lut4, shipped programs"));
        assert_eq!(page.matches("0.0625 ± 0.0100").count(), 4);
        // Two windows and two ranges of positions, two layers, of two students.
        assert_eq!(page.matches("<circle").count(), 12);
        assert_eq!(page.matches("if a &lt;b").count(), 2);
        assert_eq!(page.matches("\u{201c}\\n\u{201d} 50%").count(), 2);
        assert!(page.contains("model.layers.0.&lt;q&gt;"), "names are text");
        assert!(page.contains("not positive definite"));
        for loaded in ["src=", "href=", "<script", "<b>"] {
            assert!(!page.contains(loaded), "{loaded}");
        }
    }
}
