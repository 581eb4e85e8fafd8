//! The fast path of RESP: a command that differs from the one before it only in its key.
//!
//! Its operation, limit and cost are read once; of each further command only the key is. The general
//! path answers everything else, and a property test holds both to the same answers and counts.

use tidegate::batch::Prepared;
use tidegate::{Limit, Scope, Source};

use super::command::{CELL, CELL_SCOPE, CheckedLimits, Session};
use super::frame::{FoundKey, NO_SHAPE, Shape};
use super::reply::Replies;
use super::throttle::Throttle;
use super::turn::MAX_ANSWERS_BYTES;
use crate::auth::May;

/// Keys that are read before the first of them is decided, so that the store can prefetch their
/// state.
const AHEAD: usize = 16;

/// The shape of the last command, and its batch if the fast path can answer it.
#[derive(Debug)]
pub(crate) struct PreparedShape {
    shape: Shape,
    batch: Option<PreparedBatch>,
}

/// Everything a command of this shape asks for, except its key.
#[derive(Debug)]
struct PreparedBatch {
    prepared: Prepared,
    cost: u64,
    is_throttle: bool,
}

impl Default for PreparedShape {
    fn default() -> Self {
        PreparedShape { shape: NO_SHAPE, batch: None }
    }
}

/// How many commands were answered, and how many bytes they took.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct AnsweredCommands {
    pub(crate) commands: usize,
    pub(crate) bytes: usize,
}

impl Session {
    /// Answers at most `most` commands at the front of `bytes`, up to the first that has another
    /// shape than the last command.
    pub(crate) fn answer_fast(
        &mut self,
        bytes: &[u8],
        most: usize,
        out: &mut Replies,
    ) -> AnsweredCommands {
        let mut answered = AnsweredCommands::default();
        let is_for_general_path =
            self.fast_path.batch.is_none() && self.fast_path.shape == self.known.shape();
        if is_for_general_path || self.may == May::Nothing {
            return answered;
        }
        let mut keys = [(&[][..], 0); AHEAD];
        while out.bytes.len() <= MAX_ANSWERS_BYTES {
            let (mut found, mut end) = (0, answered.bytes);
            for key in keys.iter_mut().take(most - answered.commands) {
                let Some(FoundKey { bytes: own, taken }) = self.known.key(&bytes[end..]) else {
                    break;
                };
                (key.0, end) = (own, end + taken);
                found += 1;
            }
            if found == 0 {
                break;
            }
            if self.fast_path.shape != self.known.shape() {
                self.prepare();
            }
            let Some(PreparedBatch { prepared, cost, is_throttle }) = &self.fast_path.batch else {
                break;
            };
            keys[..found].iter_mut().for_each(|key| key.1 = *cost);
            if *is_throttle {
                self.engine.check_batch(prepared, CELL, &keys[..found], |verdict| {
                    out.throttle(Throttle::numbers(verdict.allowed, verdict), Source::Store);
                });
            } else {
                self.engine.check_batch(prepared, "", &keys[..found], |verdict| {
                    out.verdict(verdict.allowed, verdict, &[], Source::Store);
                });
            }
            answered = AnsweredCommands { commands: answered.commands + found, bytes: end };
        }
        if answered.commands > 0 {
            self.begun = None;
        }
        answered
    }

    /// Prepares a batch for the shape of the last command.
    fn prepare(&mut self) {
        let known = std::mem::take(&mut self.known);
        let before = self.fast_path.batch.take();
        let batch = self.batchable(&known.words()).and_then(|check| {
            let (limit, is_throttle): (Limit, bool) = match &check.under {
                CheckedLimits::Throttle(limit) => (*limit, true),
                CheckedLimits::Limits(limits) => match limits.as_slice() {
                    [limit] => (*limit, false),
                    _ => return None,
                },
            };
            let prepared = match before {
                Some(PreparedBatch { prepared, is_throttle: same, .. })
                    if same == is_throttle && *prepared.limit() == limit =>
                {
                    prepared
                }
                _ => self
                    .engine
                    .prepare(if is_throttle { &CELL_SCOPE } else { &Scope::AdHoc }, &limit)?,
            };
            Some(PreparedBatch { prepared, cost: check.cost, is_throttle })
        });
        self.fast_path = PreparedShape { shape: known.shape(), batch };
        self.known = known;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use proptest::prelude::*;
    use tidegate::{ManualClock, Memory, Timestamp};

    use super::super::turn::{TURN, answer_one_by_one, answer_turn};
    use super::*;
    use crate::auth::{Auth, Caller, Guard};
    use crate::backend::Backend;
    use crate::engine::Engine;
    use crate::observe::{Log, LogSettings, Observer};
    use crate::protocol::Protocol;
    use crate::rules::Rules;

    /// A connection over a store of its own.
    struct TestConnection {
        clock: ManualClock,
        session: Session,
        out: Replies,
        bytes: Vec<u8>,
        answers: Vec<u8>,
    }

    impl TestConnection {
        fn begin() -> TestConnection {
            let clock = ManualClock::new();
            clock.set(Timestamp::from_micros(1_700_000_000_000_000));
            let store = Backend::Memory(Memory::builder().clock(clock.clone()).build());
            let observer = Observer::new(
                Log::disabled(),
                &LogSettings { show_keys: true, ..LogSettings::default() },
            );
            let engine = Engine::with_observer(store, Rules::default(), observer)
                .for_protocol(Protocol::Resp);
            let session = Session::new(
                engine,
                Arc::new(Guard::new(Auth::default())),
                Caller::at([127, 0, 0, 1].into()),
                1,
            );
            TestConnection {
                clock,
                session,
                out: Replies::default(),
                bytes: Vec::new(),
                answers: Vec::new(),
            }
        }

        /// Reads as the listener does.
        async fn read(&mut self, piece: &[u8]) {
            self.bytes.extend_from_slice(piece);
            loop {
                let turn = answer_turn(&self.bytes, &mut self.session, &mut self.out).await;
                self.bytes.drain(..turn.used);
                self.answers.append(&mut self.out.bytes);
                if !turn.more || self.session.closing {
                    return;
                }
            }
        }

        /// Reads one command at a time and forgets the one before, so that each takes the general
        /// path.
        async fn read_one_by_one(&mut self, piece: &[u8]) {
            self.bytes.extend_from_slice(piece);
            self.bytes =
                answer_one_by_one(&self.bytes, &mut self.session, &mut self.out).await.to_vec();
            self.answers.append(&mut self.out.bytes);
        }

        /// The counted decisions, and the denied keys.
        fn counts(&self) -> (Vec<String>, Vec<(String, String, u64)>) {
            let (engine, observer) = (&self.session.engine, self.session.engine.observer());
            let page = observer.metrics().text(engine.store(), 0);
            let decisions =
                page.lines().filter(|line| line.starts_with("tidegate_decisions_total"));
            let denied = observer
                .top()
                .list(usize::MAX)
                .into_iter()
                .map(|one| (one.rule, one.key, one.denied));
            let mut denied: Vec<_> = denied.collect();
            denied.sort_unstable();
            (decisions.map(String::from).collect(), denied)
        }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    fn written(words: &[String]) -> Vec<u8> {
        let each: String =
            words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
        format!("*{}\r\n{each}", words.len()).into_bytes()
    }

    /// A run of commands that differ only in their keys.
    fn row() -> impl Strategy<Value = Vec<u8>> {
        let shapes = [
            "CL.THROTTLE KEY 2 3 60",
            "CL.THROTTLE KEY 15 30 60 1",
            "cl.throttle KEY 15 30 60 4",
            "CL.THROTTLE KEY 15 30 60 0",
            "CL.THROTTLE KEY 15 30 60 -1",
            "CL.THROTTLE KEY 200 3000000000 1 100",
            "CL.THROTTLE KEY 15 0 60",
            "CL.THROTTLE KEY 15",
            "TG.CHECK KEY 3/s",
            "TG.CHECK KEY 3/s COST 2",
            "TG.CHECK KEY 3/m;5/h",
            "TG.CHECK KEY 2/s;window",
            "TG.CHECK KEY 2/m_window",
            "TG.CHECK KEY 3/m_log COST 2",
            "TG.CHECK KEY 3/s ID 7",
            "TG.PEEK KEY 3/s",
            "TG.MARK ON",
            "TG.MARK OFF",
            "HELLO 3",
            "HELLO 2",
            "PING KEY",
            "PING",
            "RESET",
            "TG.CHECK KEY 3/s AS MAP",
            "MULTI",
            "EXEC",
            "DISCARD",
            "WATCH KEY",
            "NOPE KEY",
        ];
        let keys = prop_oneof![4 => "[ab]", 2 => "k[0-9]{1,12}", 1 => "[a$\r\n]{0,30}", 1 => "a{1000,1040}"];
        let row = (prop::sample::select(shapes.to_vec()), prop::collection::vec(keys, 1..2 * TURN));
        let transaction = |(commands, end): (Vec<u8>, &str)| {
            [written(&["MULTI".into()]), commands, written(&[end.into()])].concat()
        };
        let row = row.prop_map(|(shape, keys)| {
            let words = |key: &str| -> Vec<String> {
                shape
                    .split(' ')
                    .map(|word| if word == "KEY" { key.into() } else { word.replace('_', " ") })
                    .collect()
            };
            keys.iter().flat_map(|key| written(&words(key))).collect::<Vec<u8>>()
        });
        let ends = prop::sample::select(vec!["EXEC", "EXEC", "EXEC", "DISCARD", "RESET", "PING"]);
        (row, ends, any::<bool>()).prop_map(
            move |(row, end, is_queued)| if is_queued { transaction((row, end)) } else { row },
        )
    }

    #[test]
    fn commands_that_differ_only_in_their_keys_take_the_fast_path() {
        for shape in ["CL.THROTTLE KEY 15 30 60 1", "TG.CHECK KEY 10/s"] {
            let mut connection = TestConnection::begin();
            let write = |key: &str| {
                written(&shape.split(' ').map(|word| word.replace("KEY", key)).collect::<Vec<_>>())
            };
            block_on(connection.read(&write("first")));
            let rest: Vec<u8> =
                ["other", "a", "of another length"].into_iter().flat_map(write).collect();
            let cut = [&rest[..], &rest[..20]].concat();
            let answered = connection.session.answer_fast(&cut, TURN, &mut connection.out);
            assert_eq!((answered.commands, answered.bytes), (3, rest.len()), "{shape}");
            assert_eq!(
                connection.session.answer_fast(&cut, 2, &mut connection.out).commands,
                2,
                "no more than that"
            );
            connection.session.may = May::Nothing;
            assert_eq!(
                connection.session.answer_fast(&cut, TURN, &mut connection.out).commands,
                0,
                "an unauthenticated connection"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        /// Any commands, cut anywhere, are answered and counted as if each had arrived alone.
        #[test]
        fn the_fast_path_answers_and_counts_as_the_general_path(
            rows in prop::collection::vec(row(), 1..6),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..2),
            cuts in prop::collection::vec((any::<prop::sample::Index>(), 0..2_000_000_u64), 0..6),
        ) {
            let mut stream = rows.concat();
            for (at, byte) in changes {
                let at = at.index(stream.len());
                stream[at] = byte;
            }
            let mut cuts: Vec<(usize, u64)> = cuts.iter().map(|(at, us)| (at.index(stream.len()), *us)).collect();
            cuts.push((stream.len(), 0));
            cuts.sort_unstable();
            let (mut fast, mut general) = (TestConnection::begin(), TestConnection::begin());
            let mut from = 0;
            for (to, us) in cuts {
                block_on(fast.read(&stream[from..to]));
                block_on(general.read_one_by_one(&stream[from..to]));
                prop_assert_eq!(fast.answers.escape_ascii().to_string(), general.answers.escape_ascii().to_string());
                prop_assert_eq!(fast.session.closing, general.session.closing);
                if fast.session.closing {
                    break; // the connection is closed
                }
                prop_assert_eq!(&fast.bytes, &general.bytes);
                for clock in [&fast.clock, &general.clock] {
                    clock.advance(Duration::from_micros(us));
                }
                from = to;
            }
            prop_assert_eq!(fast.counts(), general.counts());
        }
    }
}
