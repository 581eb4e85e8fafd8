//! A table for the terminal, followed by timelines.

use std::fmt::Write;

use tidegate_core::Algorithm;
use tidegate_trace::Micros;

use super::Scene;
use super::contender::{Contender, Window};
use super::summary::Summary;
use super::timeline::Axis;
use crate::output::{Paint, grouped, human};

/// The most characters of a timeline.
const COLUMNS: u64 = 60;
/// Eighths of a character, from nothing to full.
const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

pub(super) fn draw(
    scene: &Scene,
    contenders: &[Contender],
    summaries: &[Summary],
    paint: Paint,
) -> String {
    let mut text = format!("{}\n\n", paint.strong(&scene.title));
    table(&mut text, contenders, summaries, paint);
    timelines(&mut text, scene, contenders, summaries, paint);
    text
}

fn table(text: &mut String, contenders: &[Contender], summaries: &[Summary], paint: Paint) {
    let with_units = summaries.iter().any(Summary::has_costs);
    let mut head = vec!["limit", "offered", "allowed", "denied", "share"];
    if with_units {
        head.extend(["units asked", "units granted"]);
    }
    head.extend(["longest denial", "first denial", "most in one period"]);
    let mut rows = vec![head.into_iter().map(String::from).collect::<Vec<_>>()];
    for (contender, summary) in contenders.iter().zip(summaries) {
        let mut row = vec![
            shown(contender.text()),
            grouped(summary.offered),
            grouped(summary.allowed),
            grouped(summary.denied),
            summary.share(),
        ];
        if with_units {
            row.extend([summary.units_offered.to_string(), summary.units_granted.to_string()]);
        }
        row.push(match contender.longest_streak() {
            0 => "-".into(),
            n => format!("{} in a row", grouped(n)),
        });
        row.push(summary.first_denial_us.map_or("-".into(), |at| format!("at {}", Micros(at))));
        row.push(contender.windows().iter().map(most).collect::<Vec<_>>().join("; "));
        rows.push(row);
    }
    let columns = rows[0].len();
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for (index, row) in rows.iter().enumerate() {
        let cells =
            row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
                0 => format!("{cell:width$}"),
                last if last + 1 == columns => cell.clone(),
                _ => format!("{cell:>width$}"),
            });
        let line = cells.collect::<Vec<_>>().join("   ");
        let _ = writeln!(text, "{}", if index == 0 { paint.faint(line) } else { line });
    }
    if let Some(others) =
        summaries.first().map(|summary| summary.others).filter(|others| *others > 0)
    {
        let _ = writeln!(
            text,
            "\nBesides, {} asked for nothing: looks, refunds and resets.",
            lines(others)
        );
    }
}

/// `20 in 1s (limit 10)`: the most that one key was granted within a period.
fn most(window: &Window) -> String {
    let at_least = if window.most.at_least { "at least " } else { "" };
    let algorithm = window.limit.algorithm();
    let units = grouped(window.most.units);
    match algorithm {
        Algorithm::Concurrent(_) => format!("{at_least}{units} in flight"),
        _ => format!("{at_least}{units} in {}", Micros(algorithm.period_us())),
    }
}

fn timelines(
    text: &mut String,
    scene: &Scene,
    contenders: &[Contender],
    summaries: &[Summary],
    paint: Paint,
) {
    let axis = Axis::over(summaries.iter().map(|summary| &summary.timeline), scene.end_us, COLUMNS);
    let bars: Vec<_> = summaries.iter().map(|summary| summary.timeline.bars(&axis)).collect();
    let tallest = bars.iter().flatten().map(|bar| bar.offered()).max().unwrap_or(0);
    if tallest == 0 {
        return;
    }
    for (contender, bars) in contenders.iter().zip(&bars) {
        let line = |height: &dyn Fn(usize) -> u64| {
            (0..bars.len()).map(|bar| block(height(bar), tallest)).collect::<String>()
        };
        let _ = writeln!(text, "\n{}", paint.strong(shown(contender.text())));
        let _ = writeln!(text, "  allowed |{}|", paint.good(line(&|bar| bars[bar].allowed)));
        let _ = writeln!(text, "  denied  |{}|", paint.bad(line(&|bar| bars[bar].denied)));
    }
    let (start, end) = (axis.label(axis.start_us), axis.label(axis.end_us()));
    let gap = axis.bars.saturating_sub(start.chars().count());
    let _ = writeln!(text, "           {start}{end:>gap$}");
    let legend =
        format!("one column is {}, a full one {} units", human(axis.bar_us), grouped(tallest));
    let _ = writeln!(text, "           {}", paint.faint(legend));
}

/// A share of a full block, rounded up, so that little is not mistaken for nothing.
fn block(height: u64, tallest: u64) -> char {
    let eighths = (u128::from(height) * 8).div_ceil(u128::from(tallest.max(1)));
    BLOCKS[usize::try_from(eighths).unwrap_or(8).min(8)]
}

fn lines(n: u64) -> String {
    if n == 1 { "1 line".into() } else { format!("{} lines", grouped(n)) }
}

/// A limit as written, without characters that break the table.
fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
