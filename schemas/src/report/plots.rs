//! What the page shows of one student: where in the text and in the model it differs.

use std::fmt::Write;

use super::html::{colour, escape};
use super::{Choice, Student, TableSample};

/// Size of the drawing area, and of its margins to the left and above.
const SIZE: (f64, f64) = (840.0, 140.0);
const AT: (f64, f64) = (45.0, 10.0);

/// Plots and tables, those that there are figures for.
pub(super) fn student(out: &mut String, student: &Student) {
    by_position(out, student);
    by_layer(out, student);
    worst(out, student);
    matrices(out, student);
    tables(out, &student.tables);
}

/// An empty plot from zero to `top`.
fn begin(out: &mut String, title: &str, top: f64) {
    let _ = write!(
        out,
        "<figure><svg viewBox=\"0 0 900 190\" role=\"img\"><title>{title}</title>\
         <path d=\"M40 10V150H890\" fill=\"none\" stroke=\"#999\"/>\
         <text x=\"0\" y=\"14\">{top:.3}</text><text x=\"20\" y=\"154\">0</text>"
    );
}

fn end(out: &mut String, caption: &str) {
    let _ = write!(out, "</svg><figcaption>{caption}</figcaption></figure>");
}

/// Points joined by a line; `points` are shares of the width and of the height.
fn line(out: &mut String, points: &[(f64, f64)], colour: &str) {
    let place = |&(x, y): &(f64, f64)| (AT.0 + SIZE.0 * x, AT.1 + SIZE.1 * (1.0 - y));
    let path: Vec<String> = points
        .iter()
        .map(place)
        .map(|(x, y)| format!("{x:.1} {y:.1}"))
        .collect();
    let _ = write!(
        out,
        "<path d=\"M{}\" fill=\"none\" stroke=\"{colour}\"/>",
        path.join("L")
    );
    for (x, y) in points.iter().map(place) {
        let _ = write!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"
        );
    }
}

/// Where the `at`-th of `count` points stands, as a share of the width.
fn share(at: usize, count: usize) -> f64 {
    at as f64 / count.max(2).saturating_sub(1) as f64
}

fn by_position(out: &mut String, student: &Student) {
    let ranges = || student.sets.iter().map(|q| &q.kl_positions);
    let count = ranges().map(Vec::len).max().unwrap_or(0);
    let top = ranges().flatten().map(|p| p.kl_mean).fold(1e-9, f64::max);
    if count == 0 {
        return;
    }
    begin(out, "KL by position", top);
    if let Some(longest) = ranges().max_by_key(|p| p.len()) {
        for (at, range) in longest.iter().enumerate() {
            let x = AT.0 + SIZE.0 * share(at, count);
            let _ = write!(
                out,
                "<text x=\"{x:.1}\" y=\"168\" text-anchor=\"middle\">{}</text>",
                range.from
            );
        }
    }
    for (set, ranges) in ranges().enumerate() {
        let points: Vec<(f64, f64)> = ranges
            .iter()
            .enumerate()
            .map(|(at, range)| (share(at, count), range.kl_mean / top))
            .collect();
        if !points.is_empty() {
            line(out, &points, colour(set));
        }
    }
    end(
        out,
        "Mean KL by the position in the window, from the number below on.",
    );
}

fn by_layer(out: &mut String, student: &Student) {
    let errors = &student.layer_errors;
    if errors.is_empty() {
        return;
    }
    let top = errors.iter().copied().fold(1e-9, f64::max);
    begin(out, "Error by layer", top);
    let step = errors.len().div_ceil(16);
    for layer in (0..errors.len()).step_by(step) {
        let x = AT.0 + SIZE.0 * share(layer, errors.len());
        let _ = write!(
            out,
            "<text x=\"{x:.1}\" y=\"168\" text-anchor=\"middle\">{layer}</text>"
        );
    }
    let points: Vec<(f64, f64)> = errors
        .iter()
        .enumerate()
        .map(|(layer, error)| (share(layer, errors.len()), error / top))
        .collect();
    line(out, &points, "#555");
    end(
        out,
        "Distance of the hidden states after each layer, relative to the norm of the \
         original's.",
    );
}

fn worst(out: &mut String, student: &Student) {
    if student.sets.iter().all(|q| q.worst.is_empty()) {
        return;
    }
    out.push_str(
        "<h3>Where it differs most</h3><table><tr><th>text</th><th>KL</th><th>after</th>\
         <th>the text goes on</th><th>original</th><th>quantized</th></tr>",
    );
    for q in &student.sets {
        for w in &q.worst {
            let _ = write!(
                out,
                "<tr><td>{}, window {}, token {}</td><td>{:.3}</td><td>…{}</td><td>{}</td>\
                 <td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
                escape(&q.set),
                w.window,
                w.position,
                w.kl,
                escape(&visible(&w.context)),
                w.next.as_deref().map_or_else(|| "-".to_string(), quoted),
                choices(&w.teacher),
                choices(&w.student),
            );
        }
    }
    out.push_str("</table>");
}

fn choices(all: &[Choice]) -> String {
    let one = |c: &Choice| format!("{} {:.0}%", quoted(&c.token), 100.0 * c.probability);
    all.iter().map(one).collect::<Vec<_>>().join("<br>")
}

fn quoted(token: &str) -> String {
    format!("\u{201c}{}\u{201d}", escape(&visible(token)))
}

/// Control characters as Rust writes them.
fn visible(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

fn matrices(out: &mut String, student: &Student) {
    if student.matrices.is_empty() {
        return;
    }
    out.push_str(
        "<details><summary>Matrices</summary><table><tr><th>matrix</th><th>bits</th>\
         <th>method</th><th>relative error</th><th>output error</th><th>instead of the method \
         asked for</th></tr>",
    );
    for m in &student.matrices {
        let _ = write!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{:.4}</td><td>{:.3e}</td><td>{}</td></tr>",
            escape(&m.name),
            m.bits,
            escape(&m.method),
            m.plain_error,
            m.weighted_error,
            escape(m.fallback.as_deref().unwrap_or("")),
        );
    }
    out.push_str("</table></details>");
}

/// A row of ticks for each table, on a scale of its own.
fn tables(out: &mut String, tables: &[TableSample]) {
    if tables.is_empty() {
        return;
    }
    let height = 34 * tables.len() + 6;
    let _ = write!(
        out,
        "<figure><svg viewBox=\"0 0 900 {height}\" role=\"img\"><title>Tables</title>"
    );
    for (at, table) in tables.iter().enumerate() {
        let top = table.values.iter().map(|v| v.abs()).fold(1e-30, f32::max);
        let y = 34 * at + 12;
        let _ = write!(
            out,
            "<text x=\"0\" y=\"{y}\">{}, group {}: ±{top:.4}</text>\
             <path d=\"M0 {base}H885\" stroke=\"#ccc\"/>",
            escape(&table.matrix),
            table.group,
            base = y + 12,
        );
        for value in &table.values {
            let x = 442.5 * (1.0 + f64::from(value / top));
            let _ = write!(
                out,
                "<path d=\"M{x:.1} {}v12\" stroke=\"#0072b2\" stroke-width=\"2\"/>",
                y + 6
            );
        }
    }
    end(
        out,
        "Values of some tables, each between minus and plus its largest magnitude.",
    );
}
