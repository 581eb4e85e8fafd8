//! Commands that differ from the one before them in nothing but their key, which is what most
//! connections send: the shortest way. What they ask is read once, and of each only its key is
//! looked at. The answers are the same as by the way that all others go.

use tidegate::batch::Prepared;
use tidegate::{Limit, Scope, Source};

use super::command::{CELL, CELL_SCOPE, Session, Under};
use super::frame::{Key, NO_SHAPE, Shape};
use super::reply::Replies;
use super::throttle::Throttle;
use super::turn::MAX_ANSWERS_BYTES;
use crate::auth::May;

/// Keys that are read before the first of them is decided, so that their memory is fetched
/// meanwhile.
const AHEAD: usize = 16;

/// What commands of one shape ask, if they can be answered here.
#[derive(Debug)]
pub(crate) struct Alike {
    shape: Shape,
    asked: Option<Asked>,
}

/// Their keys are all that is missing.
#[derive(Debug)]
struct Asked {
    prepared: Prepared,
    cost: u64,
    is_throttle: bool,
}

impl Default for Alike {
    fn default() -> Self {
        Alike { shape: NO_SHAPE, asked: None }
    }
}

/// Commands that were answered, and how many bytes they took.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Answered {
    pub(crate) commands: usize,
    pub(crate) bytes: usize,
}

impl Session {
    /// Answers commands at the front of `bytes`, at most so many, for as long as they are like the
    /// last that was read.
    pub(crate) fn answer_alike(
        &mut self,
        bytes: &[u8],
        most: usize,
        out: &mut Replies,
    ) -> Answered {
        let mut answered = Answered::default();
        let is_for_others = self.alike.asked.is_none() && self.alike.shape == self.known.shape();
        if is_for_others || self.may == May::Nothing {
            return answered;
        }
        let mut keys = [(&[][..], 0); AHEAD];
        while out.bytes.len() <= MAX_ANSWERS_BYTES {
            let (mut found, mut end) = (0, answered.bytes);
            for key in keys.iter_mut().take(most - answered.commands) {
                let Some(Key { bytes: own, taken }) = self.known.key(&bytes[end..]) else { break };
                (key.0, end) = (own, end + taken);
                found += 1;
            }
            if found == 0 {
                break;
            }
            if self.alike.shape != self.known.shape() {
                self.learn();
            }
            let Some(Asked { prepared, cost, is_throttle }) = &self.alike.asked else { break };
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
            answered = Answered { commands: answered.commands + found, bytes: end };
        }
        if answered.commands > 0 {
            self.begun = None;
        }
        answered
    }

    /// Reads what the command asks that is known.
    fn learn(&mut self) {
        let known = std::mem::take(&mut self.known);
        let question = self.question(&known.words());
        let before = self.alike.asked.take();
        let asked = question.and_then(|question| {
            let (limit, is_throttle): (Limit, bool) = match &question.under {
                Under::Throttle(limit) => (*limit, true),
                Under::Limits(limits) => match limits.as_slice() {
                    [limit] => (*limit, false),
                    _ => return None,
                },
            };
            let prepared = match before {
                Some(Asked { prepared, is_throttle: same, .. })
                    if same == is_throttle && *prepared.limit() == limit =>
                {
                    prepared
                }
                _ => self
                    .engine
                    .prepare(if is_throttle { &CELL_SCOPE } else { &Scope::AdHoc }, &limit)?,
            };
            Some(Asked { prepared, cost: question.cost, is_throttle })
        });
        self.alike = Alike { shape: known.shape(), asked };
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

    /// One end of a connection over a store of its own.
    struct Talk {
        clock: ManualClock,
        session: Session,
        out: Replies,
        bytes: Vec<u8>,
        answers: Vec<u8>,
    }

    impl Talk {
        fn begin() -> Talk {
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
            Talk { clock, session, out: Replies::default(), bytes: Vec::new(), answers: Vec::new() }
        }

        /// As the listener does it.
        async fn hear(&mut self, piece: &[u8]) {
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

        /// One command at a time, with nothing known of the one before: each goes the way that all
        /// can go.
        async fn hear_one_by_one(&mut self, piece: &[u8]) {
            self.bytes.extend_from_slice(piece);
            self.bytes =
                answer_one_by_one(&self.bytes, &mut self.session, &mut self.out).await.to_vec();
            self.answers.append(&mut self.out.bytes);
        }

        /// What was counted, and who was denied.
        fn told(&self) -> (Vec<String>, Vec<(String, String, u64)>) {
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

    /// Commands that differ in their keys, in front of which anything may stand.
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
    fn commands_that_differ_in_their_keys_go_the_short_way() {
        for shape in ["CL.THROTTLE KEY 15 30 60 1", "TG.CHECK KEY 10/s"] {
            let mut talk = Talk::begin();
            let write = |key: &str| {
                written(&shape.split(' ').map(|word| word.replace("KEY", key)).collect::<Vec<_>>())
            };
            block_on(talk.hear(&write("first")));
            let rest: Vec<u8> =
                ["other", "a", "of another length"].into_iter().flat_map(write).collect();
            let cut = [&rest[..], &rest[..20]].concat();
            let answered = talk.session.answer_alike(&cut, TURN, &mut talk.out);
            assert_eq!((answered.commands, answered.bytes), (3, rest.len()), "{shape}");
            assert_eq!(
                talk.session.answer_alike(&cut, 2, &mut talk.out).commands,
                2,
                "no more than that"
            );
            talk.session.may = May::Nothing;
            assert_eq!(
                talk.session.answer_alike(&cut, TURN, &mut talk.out).commands,
                0,
                "who is it?"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        /// Whatever is sent, in whatever pieces, is answered as if each command had come alone, and
        /// counted so.
        #[test]
        fn the_short_way_answers_as_the_long_one(
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
            let (mut short, mut long) = (Talk::begin(), Talk::begin());
            let mut from = 0;
            for (to, us) in cuts {
                block_on(short.hear(&stream[from..to]));
                block_on(long.hear_one_by_one(&stream[from..to]));
                prop_assert_eq!(short.answers.escape_ascii().to_string(), long.answers.escape_ascii().to_string());
                prop_assert_eq!(short.session.closing, long.session.closing);
                if short.session.closing {
                    break; // nobody hears what is left
                }
                prop_assert_eq!(&short.bytes, &long.bytes);
                for clock in [&short.clock, &long.clock] {
                    clock.advance(Duration::from_micros(us));
                }
                from = to;
            }
            prop_assert_eq!(short.told(), long.told());
        }
    }
}
