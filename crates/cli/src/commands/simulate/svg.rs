//! A picture: one panel for each limit over a shared time axis.
//!
//! Written by hand, as text: it is a few rectangles and labels, and a plotting crate would be
//! larger than this program. Colors are given twice, for light and for dark surroundings, and the
//! picture brings its own background.

use std::fmt::Write;

use tidegate_core::Algorithm;
use tidegate_trace::Micros;

use super::Scene;
use super::contender::{Contender, Window};
use super::summary::Summary;
use super::timeline::{Axis, Flow};
use crate::output::{grouped, human};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 76.0;
const HEADER: f64 = 84.0;
const FOOTER: f64 = 46.0;
/// The height above the bars of a panel: the limit, and the label of the busiest period.
const CAPTION: f64 = 46.0;
const PLOT: f64 = 120.0;
const GAP: f64 = 26.0;
const PLOT_WIDTH: f64 = WIDTH - LEFT - RIGHT;

const MOST_BARS: u64 = 120;
const MOST_TICKS: u64 = 12;
/// The most characters of a limit that fit beside its numbers.
const LIMIT_CHARS: usize = 48;
/// The most panels; of more limits, the first ones are drawn, with a note.
const MOST_PANELS: usize = 24;

const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px;fill:#52606d}
.back{fill:#ffffff}.title{font-size:18px;font-weight:600;fill:#1f2933}.limit{font-size:14px;font-weight:600;fill:#1f2933}
.grid{stroke:#e4e7eb;stroke-width:1}.base{stroke:#9aa5b1;stroke-width:1}
.allowed{fill:#2b7bba}.denied{fill:#f2a154}
.pace{stroke:#1f2933;stroke-width:1.2;stroke-dasharray:5 4;fill:none}.pace-label{fill:#1f2933}
.busy{fill:#7b8794;fill-opacity:.15}.over{fill:#d64545;fill-opacity:.17}.over-label{fill:#c22d2d;font-weight:600}
@media (prefers-color-scheme:dark){text{fill:#9fb0c0}.back{fill:#11161c}.title,.limit,.pace-label{fill:#e9eef3}
.grid{stroke:#262f38}.base{stroke:#55626f}.allowed{fill:#58a6e0}.denied{fill:#d98a3d}.pace{stroke:#e9eef3}
.busy{fill:#9fb0c0;fill-opacity:.16}.over{fill:#ff7b72;fill-opacity:.22}.over-label{fill:#ff8f87}}
";

pub(super) fn draw(scene: &Scene, contenders: &[Contender], summaries: &[Summary]) -> String {
    let axis =
        Axis::over(summaries.iter().map(|summary| &summary.timeline), scene.end_us, MOST_BARS);
    let bars: Vec<Vec<Flow>> =
        summaries.iter().map(|summary| summary.timeline.bars(&axis)).collect();
    let tallest = bars.iter().flatten().map(|bar| bar.offered()).max().unwrap_or(0);
    let scale = Scale::up_to(tallest);
    let panels = contenders.len().min(MOST_PANELS);
    let height = HEADER + panels as f64 * (CAPTION + PLOT + GAP) - GAP + FOOTER;

    let mut svg = String::new();
    let title = escaped(&scene.title, 90);
    let _ = writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">"#
    );
    let _ = writeln!(svg, "<title>{title}</title>\n<style>\n{STYLE}</style>");
    let _ = writeln!(svg, r#"<rect class="back" width="{WIDTH}" height="{height}" rx="8"/>"#);
    let _ = writeln!(svg, r#"<text class="title" x="{LEFT}" y="36">{title}</text>"#);
    legend(&mut svg, &axis);
    let mut top = HEADER;
    for ((contender, summary), bars) in contenders.iter().zip(summaries).zip(&bars).take(panels) {
        let panel = Panel { top: top + CAPTION, axis: &axis, scale: &scale };
        panel.caption(&mut svg, contender, summary);
        panel.busiest(&mut svg, contender);
        panel.grid(&mut svg);
        panel.bars(&mut svg, bars);
        panel.paces(&mut svg, contender);
        top += CAPTION + PLOT + GAP;
    }
    times(&mut svg, &axis, top - GAP);
    if panels < contenders.len() {
        let more = contenders.len() - panels;
        let _ = writeln!(
            svg,
            r#"<text x="{LEFT}" y="{:.0}">… and {more} limits more</text>"#,
            height - 8.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// What the colors mean, and how much time a bar covers.
fn legend(svg: &mut String, axis: &Axis) {
    let y = 64.0;
    let mut x = LEFT;
    for (class, word, width) in [("allowed", "allowed", 80.0), ("denied", "denied", 72.0)] {
        let _ = writeln!(
            svg,
            r#"<rect class="{class}" x="{x}" y="{:.0}" width="12" height="12" rx="2"/>"#,
            y - 10.0
        );
        let _ = writeln!(svg, r#"<text x="{:.0}" y="{y}">{word}</text>"#, x + 18.0);
        x += width;
    }
    let _ = writeln!(svg, r#"<text x="{x}" y="{y}">stacked: offered</text>"#);
    x += 122.0;
    let _ = writeln!(svg, r#"<path class="pace" d="M{x} {:.0}h24"/>"#, y - 4.0);
    let _ = writeln!(svg, r#"<text x="{:.0}" y="{y}">pace of one key</text>"#, x + 30.0);
    x += 150.0;
    let _ =
        writeln!(svg, r#"<rect class="busy" x="{x}" y="{:.0}" width="18" height="12"/>"#, y - 10.0);
    let _ = writeln!(
        svg,
        r#"<text x="{:.0}" y="{y}">its busiest period, red if over the amount</text>"#,
        x + 24.0
    );
    let bar = human(axis.bar_us);
    let _ = writeln!(
        svg,
        r#"<text x="{:.0}" y="{y}" text-anchor="end">units per {bar}</text>"#,
        WIDTH - RIGHT
    );
}

/// The times under the last panel.
fn times(svg: &mut String, axis: &Axis, bottom: f64) {
    for at in axis.ticks(MOST_TICKS) {
        let x = x_of(axis, at);
        let y = bottom + 18.0;
        let _ = writeln!(
            svg,
            r#"<text x="{x:.1}" y="{y:.0}" text-anchor="middle">{}</text>"#,
            axis.label(at)
        );
    }
}

fn x_of(axis: &Axis, at_us: u64) -> f64 {
    let length = axis.end_us() - axis.start_us;
    let at_us = at_us.clamp(axis.start_us, axis.end_us());
    LEFT + (at_us - axis.start_us) as f64 / length.max(1) as f64 * PLOT_WIDTH
}

/// The height of a panel in units, with a few round lines.
struct Scale {
    top: u64,
    step: u64,
}

impl Scale {
    fn up_to(tallest: u64) -> Scale {
        let tallest = tallest.max(1);
        let powers = (0..19).map(|power| 10_u64.pow(power));
        let mut steps = powers.flat_map(|power| [1, 2, 5].map(|n| power.saturating_mul(n)));
        let step = steps.find(|step| tallest.div_ceil(*step) <= 4).unwrap_or(u64::MAX);
        Scale { top: tallest.div_ceil(step).saturating_mul(step), step }
    }

    fn height(&self, units: f64) -> f64 {
        units / self.top as f64 * PLOT
    }
}

struct Panel<'a> {
    /// The y of the upper edge of its bars.
    top: f64,
    axis: &'a Axis,
    scale: &'a Scale,
}

impl Panel<'_> {
    fn bottom(&self) -> f64 {
        self.top + PLOT
    }

    fn caption(&self, svg: &mut String, contender: &Contender, summary: &Summary) {
        let y = self.top - CAPTION + 16.0;
        let limit = escaped(contender.text(), LIMIT_CHARS);
        let _ = writeln!(svg, r#"<text class="limit" x="{LEFT}" y="{y:.0}">{limit}</text>"#);
        let (allowed, offered) = (grouped(summary.allowed), grouped(summary.offered));
        let mut numbers = format!("{allowed} of {offered} allowed ({})", summary.share());
        if let Some(at) = summary.first_denial_us {
            let _ = write!(numbers, ", first denial at {}", Micros(at));
        }
        let x = WIDTH - RIGHT;
        let _ = writeln!(svg, r#"<text x="{x}" y="{y:.0}" text-anchor="end">{numbers}</text>"#);
    }

    fn grid(&self, svg: &mut String) {
        let mut path = String::new();
        for at in self.axis.ticks(MOST_TICKS) {
            let _ = write!(path, "M{:.1} {:.1}v{PLOT}", x_of(self.axis, at), self.top);
        }
        let mut level = 0;
        while level <= self.scale.top {
            let y = self.bottom() - self.scale.height(level as f64);
            let _ = write!(path, "M{LEFT} {y:.1}h{PLOT_WIDTH}");
            let (x, label_y) = (LEFT - 8.0, y + 4.0);
            let _ = writeln!(
                svg,
                r#"<text x="{x}" y="{label_y:.1}" text-anchor="end">{}</text>"#,
                short(level)
            );
            level = level.saturating_add(self.scale.step);
            if level == u64::MAX {
                break;
            }
        }
        let _ = writeln!(svg, r#"<path class="grid" d="{path}"/>"#);
    }

    fn bars(&self, svg: &mut String, bars: &[Flow]) {
        let slot = PLOT_WIDTH / self.axis.bars as f64;
        // A small gap between bars, if they are wide enough.
        let width = if slot >= 4.0 { slot - 1.0 } else { slot };
        let (mut allowed, mut denied) = (String::new(), String::new());
        for (index, bar) in bars.iter().enumerate() {
            let x = LEFT + index as f64 * slot + (slot - width) / 2.0;
            let low = self.scale.height(bar.allowed as f64);
            let high = self.scale.height(bar.offered() as f64);
            let stack = |path: &mut String, from: f64, to: f64| {
                if to > from {
                    let (y, height) = (self.bottom() - to, to - from);
                    let _ = write!(path, "M{x:.2} {y:.2}h{width:.2}v{height:.2}h-{width:.2}z");
                }
            };
            stack(&mut allowed, 0.0, low);
            stack(&mut denied, low, high);
        }
        for (class, path) in [("denied", denied), ("allowed", allowed)] {
            if !path.is_empty() {
                let _ = writeln!(svg, r#"<path class="{class}" d="{path}"/>"#);
            }
        }
        let _ =
            writeln!(svg, r#"<path class="base" d="M{LEFT} {:.1}h{PLOT_WIDTH}"/>"#, self.bottom());
    }

    /// The period in which one key was granted the most, measured against the amount of its limit.
    fn busiest(&self, svg: &mut String, contender: &Contender) {
        let share =
            |window: &&Window| window.most.units as f64 / window.limit.algorithm().amount() as f64;
        let busiest =
            contender.windows().iter().max_by(|one, two| share(one).total_cmp(&share(two)));
        let Some(window) = busiest.filter(|window| window.most.units > 0) else { return };
        let algorithm = window.limit.algorithm();
        let (amount, period_us, most) = (algorithm.amount(), algorithm.period_us(), window.most);
        let start = x_of(self.axis, most.from_us);
        let width = (x_of(self.axis, most.from_us.saturating_add(period_us)) - start).max(2.0);
        let over = most.units > amount;
        let class = if over { "over" } else { "busy" };
        let (top, height) = (self.top - 5.0, PLOT + 5.0);
        let _ = writeln!(
            svg,
            r#"<rect class="{class}" x="{start:.1}" y="{top:.1}" width="{width:.1}" height="{height}"/>"#
        );
        let at_least = if most.at_least { "at least " } else { "" };
        let within = match algorithm {
            Algorithm::Concurrent(_) => "in flight".into(),
            _ => format!("within {}", Micros(period_us)),
        };
        let text = format!("{at_least}{} {within}, limit {}", grouped(most.units), grouped(amount));
        // Seven pixels a letter is more than any usual font needs; so it stays inside the panel.
        let half = text.chars().count() as f64 * 7.0 / 2.0;
        let x = (start + width / 2.0).clamp(LEFT + half, WIDTH - RIGHT - half);
        let class = if over { r#" class="over-label""# } else { "" };
        let y = self.top - 10.0;
        let _ = writeln!(
            svg,
            r#"<text{class} x="{x:.1}" y="{y:.1}" text-anchor="middle">{text}</text>"#
        );
    }

    /// How much the limit allows in the time of one bar, in the long run.
    fn paces(&self, svg: &mut String, contender: &Contender) {
        let mut last = f64::MAX;
        for window in contender.windows() {
            let algorithm = window.limit.algorithm();
            if matches!(algorithm, Algorithm::Concurrent(_)) {
                continue;
            }
            let units =
                algorithm.amount() as f64 * self.axis.bar_us as f64 / algorithm.period_us() as f64;
            let y = self.bottom() - self.scale.height(units);
            if y < self.top {
                continue; // above every bar
            }
            let _ = writeln!(svg, r#"<path class="pace" d="M{LEFT} {y:.1}h{PLOT_WIDTH}"/>"#);
            if (y - last).abs() >= 13.0 {
                let (x, label_y) = (WIDTH - RIGHT + 6.0, y + 4.0);
                let pace =
                    format!("{}/{}", short(algorithm.amount()), period(algorithm.period_us()));
                let _ = writeln!(
                    svg,
                    r#"<text class="pace-label" x="{x}" y="{label_y:.1}">{pace}</text>"#
                );
                last = y;
            }
        }
    }
}

/// `s` and not `1s`, as in the notation.
fn period(micros: u64) -> String {
    let text = Micros(micros).to_string();
    match text.strip_prefix('1') {
        Some(unit) if unit.starts_with(char::is_alphabetic) => unit.to_owned(),
        _ => text,
    }
}

/// A number in few letters: `250`, `20k`, `1.5M`.
fn short(n: u64) -> String {
    for (unit, letter) in [
        (1_000_000_000_000_000, "P"),
        (1_000_000_000_000, "T"),
        (1_000_000_000, "G"),
        (1_000_000, "M"),
        (1_000, "k"),
    ] {
        if n >= 10 * unit || (n >= unit && n.is_multiple_of(unit / 10)) {
            let tenths = n / (unit / 10) % 10;
            let part = if tenths > 0 { format!(".{tenths}") } else { String::new() };
            return format!("{}{part}{letter}", n / unit);
        }
    }
    n.to_string()
}

/// Escapes text for XML, and cuts it to at most so many characters.
fn escaped(text: &str, most: usize) -> String {
    let mut shown: String = text.chars().take(most).collect();
    if text.chars().count() > most {
        shown.pop();
        shown.push('…');
    }
    let mut escaped = String::with_capacity(shown.len());
    for c in shown.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_round_and_cover_the_tallest() {
        for (tallest, top, step) in
            [(0, 1, 1), (3, 3, 1), (20, 20, 5), (21, 30, 10), (999, 1_000, 500)]
        {
            let scale = Scale::up_to(tallest);
            assert_eq!((scale.top, scale.step), (top, step), "{tallest}");
        }
        assert!(Scale::up_to(u64::MAX).top >= u64::MAX / 2);
    }

    #[test]
    fn long_numbers_are_shortened() {
        let rows = [
            (0, "0"),
            (1_000, "1k"),
            (1_500, "1.5k"),
            (1_234, "1234"),
            (12_340, "12.3k"),
            (2_000_000, "2M"),
        ];
        for (n, text) in rows {
            assert_eq!(short(n), text);
        }
    }

    #[test]
    fn nothing_a_user_writes_breaks_the_xml() {
        assert_eq!(escaped("<a & \"b\">\n", 90), "&lt;a &amp; &quot;b&quot;&gt; ");
        assert_eq!(escaped("abcdef", 4), "abc…");
    }
}
