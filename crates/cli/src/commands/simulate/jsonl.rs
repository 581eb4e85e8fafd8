//! One JSON object for each request and limit, ordered by request, then by limit.

use std::io::{self, Write};

use tidegate_core::Decision;

use super::Event;
use crate::args::LimitText;
use crate::commands::{json_string, write_numbers};

pub(super) struct Writer {
    out: Box<dyn Write>,
    /// The limits as JSON strings.
    limits: Vec<String>,
}

impl Writer {
    pub(super) fn new(out: Box<dyn Write>, limits: &[LimitText]) -> Self {
        Writer { out, limits: limits.iter().map(|limit| json_string(&limit.text)).collect() }
    }

    pub(super) fn write(
        &mut self,
        index: usize,
        event: &Event,
        decision: &Decision,
    ) -> io::Result<()> {
        let (key, limit) = (json_string(&event.key), &self.limits[index]);
        let (t_us, cost, op) = (event.at_us, event.cost, event.op.name());
        write!(
            self.out,
            r#"{{"t_us":{t_us},"key":{key},"cost":{cost},"op":"{op}","limit":{limit},"#
        )?;
        write_numbers(&mut self.out, decision.allowed(), decision.binding())?;
        self.out.write_all(b"}\n")
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
