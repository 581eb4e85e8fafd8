//! A budget of HTTP/2 frames that belong to no request.
//!
//! A PING of 17 bytes is answered, an empty SETTINGS of 9 is acknowledged, and a client can send a
//! million of either per second at no cost. Stream limits bound the rest of HTTP; these frames
//! belong to no stream. So each connection has a budget for them, which grows with time, with
//! requests, and with the response bytes that the client reads, since each of these has such frames
//! of its own. When the budget is exhausted, the connection is not read until it has grown again.
//! Other connections are not affected.
//!
//! Independently of it, other tasks run after a number of frames of one connection.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// The largest budget, and its growth per second, in frames.
pub(crate) const MAX_FRAMES: i64 = 1000;
/// Response bytes that earn one frame: clients open a window every few of these.
const BYTES_PER_FRAME: u64 = 1 << 10;
/// About how many frames of one connection are read before other tasks run,
const FRAMES_PER_TURN: usize = 64;
/// and the bounds of that in bytes, which are all that is known before frames are read.
const TURN_BYTES: std::ops::RangeInclusive<usize> = 1 << 10..=32 << 10;
/// The shortest pause after the budget is exhausted.
const PAUSE: Duration = Duration::from_millis(20);

/// The first bytes of an HTTP/2 connection.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The length of a frame header.
const HEAD_BYTES: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Finds frames in the bytes behind the preface, however they are cut.
#[derive(Debug, Default)]
struct FrameReader {
    /// Bytes until the next frame header.
    skip: usize,
    head: [u8; HEAD_BYTES],
    /// How many bytes of the frame header have arrived.
    have: usize,
    /// The last frame is part of the head of a request.
    is_of_head: bool,
    /// That head continues in the next frame.
    goes_on: bool,
    /// How often nothing was incomplete: see `FrameReader::open`.
    closed: u64,
}

/// The frames found in some bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct FrameCounts {
    frames: usize,
    requests: i64,
    /// FrameReader without request or data.
    idle: i64,
}

impl FrameReader {
    /// The number of the request head or frame header that has arrived in part, since the
    /// connection was opened.
    fn open(&self) -> Option<u64> {
        let is_open = self.have > 0 || self.goes_on || self.is_of_head && self.skip > 0;
        is_open.then_some(self.closed)
    }

    fn find(&mut self, mut bytes: &[u8]) -> FrameCounts {
        let mut found = FrameCounts::default();
        loop {
            let skipped = self.skip.min(bytes.len());
            (self.skip, bytes) = (self.skip - skipped, &bytes[skipped..]);
            if self.open().is_none() {
                self.closed += 1;
            }
            let taken = (HEAD_BYTES - self.have).min(bytes.len());
            if taken == 0 {
                return found;
            }
            self.head[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            (self.have, bytes) = (self.have + taken, &bytes[taken..]);
            if self.have < HEAD_BYTES {
                return found;
            }
            self.have = 0;
            found.frames += 1;
            let [high, middle, low, kind, flags, ..] = self.head;
            self.skip = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
            self.is_of_head = matches!(kind, HEADERS | CONTINUATION);
            self.goes_on = self.is_of_head && flags & END_HEADERS == 0;
            match kind {
                HEADERS => found.requests += 1,
                DATA if self.skip > 0 || flags & END_STREAM != 0 => {}
                _ => found.idle += 1,
            }
        }
    }
}

/// The frame budget of one connection.
#[derive(Debug)]
pub(crate) struct FrameBudget {
    frames: FrameReader,
    /// Bytes per turn, if the next frames have the size of the last.
    turn: usize,
    /// Bytes read in this turn.
    read: usize,
    /// FrameReader left; negative if more arrived together.
    left: i64,
    /// When the budget last grew.
    grown: Instant,
    /// Response bytes that the client had read by then.
    taken: u64,
    pause: Option<Pin<Box<Sleep>>>,
    /// Whether the budget was ever exhausted.
    pub(crate) was_exhausted: bool,
}

impl FrameBudget {
    pub(crate) fn new() -> Self {
        let grown = Instant::now();
        let turn = *TURN_BYTES.end();
        let frames = FrameReader::default();
        FrameBudget {
            frames,
            turn,
            read: 0,
            left: MAX_FRAMES,
            grown,
            taken: 0,
            pause: None,
            was_exhausted: false,
        }
    }

    /// The number of the request head that has arrived in part.
    pub(crate) fn open_head(&self) -> Option<u64> {
        self.frames.open()
    }

    /// Starts a turn of this connection.
    pub(crate) fn begin_turn(&mut self) {
        self.read = 0;
    }

    /// Counts bytes that have arrived; `taken` are the response bytes read so far.
    pub(crate) fn arrived(&mut self, bytes: &[u8], taken: u64) {
        let FrameCounts { frames, requests, idle } = self.frames.find(bytes);
        if bytes.is_empty() {
            return;
        }
        let each = bytes.len() / frames.max(1);
        self.turn = (each * FRAMES_PER_TURN).clamp(*TURN_BYTES.start(), *TURN_BYTES.end());
        self.read += bytes.len();
        self.left = (self.left + requests).min(MAX_FRAMES);
        if self.left < idle {
            self.grow(taken);
        }
        self.left -= idle;
        if self.left < 0 {
            self.was_exhausted = true;
            // Pause until the debt is paid and a little budget is there.
            let owed = Duration::from_secs(self.left.unsigned_abs())
                / u32::try_from(MAX_FRAMES).unwrap_or(u32::MAX);
            self.pause = Some(Box::pin(sleep(owed + PAUSE)));
        }
    }

    fn grow(&mut self, taken: u64) {
        let passed = i64::try_from(self.grown.elapsed().as_millis()).unwrap_or(i64::MAX);
        let earned = i64::try_from((taken - self.taken) / BYTES_PER_FRAME).unwrap_or(i64::MAX);
        (self.grown, self.taken) = (Instant::now(), taken);
        let grown = passed.saturating_mul(MAX_FRAMES / 1000).saturating_add(earned);
        self.left = self.left.saturating_add(grown).min(MAX_FRAMES);
    }

    /// How many bytes of the connection may be read. If none, `context` is woken when some may.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<usize> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            self.pause = None;
        }
        match self.turn.saturating_sub(self.read) {
            0 => {
                // The rest in the next turn, after other tasks.
                super::scheduler::yield_to_others(context);
                Poll::Pending
            }
            left => Poll::Ready(left),
        }
    }
}

/// The last bytes written to an HTTP/2 connection: enough for a GOAWAY with a few words.
#[derive(Debug)]
pub(crate) struct LastBytes {
    bytes: [u8; TAIL_BYTES],
}

const TAIL_BYTES: usize = 96;
const GOAWAY: u8 = 7;
/// The error code ENHANCE_YOUR_CALM.
const ENHANCE_YOUR_CALM: [u8; 4] = [0, 0, 0, 11];
/// A GOAWAY without debug data: header, last stream and error code.
const GOAWAY_BYTES: usize = HEAD_BYTES + 8;

impl Default for LastBytes {
    fn default() -> Self {
        LastBytes { bytes: [0; TAIL_BYTES] }
    }
}

impl LastBytes {
    /// Appends the first `count` bytes of these pieces.
    pub(crate) fn add<'a>(&mut self, pieces: impl IntoIterator<Item = &'a [u8]>, count: usize) {
        let mut left = count;
        for piece in pieces {
            let said = &piece[..left.min(piece.len())];
            left -= said.len();
            let last = &said[said.len().saturating_sub(TAIL_BYTES)..];
            self.bytes.copy_within(last.len().., 0);
            self.bytes[TAIL_BYTES - last.len()..].copy_from_slice(last);
            if left == 0 {
                break;
            }
        }
    }

    /// Whether the last frame is a GOAWAY with ENHANCE_YOUR_CALM. Other errors cost the server no
    /// more than a connection.
    pub(crate) fn ends_with_calm_goaway(&self) -> bool {
        (0..=TAIL_BYTES - GOAWAY_BYTES).any(|start| {
            let frame = &self.bytes[start..];
            let length = frame.len() - HEAD_BYTES;
            let is_goaway = matches!(frame, [0, 0, low, GOAWAY, 0, 0, 0, 0, 0, ..] if usize::from(*low) == length);
            is_goaway && frame[HEAD_BYTES + 4..GOAWAY_BYTES] == ENHANCE_YOUR_CALM
        })
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use proptest::prelude::*;

    use super::*;

    const PING: u8 = 6;

    fn frame(kind: u8, flags: u8, length: usize) -> Vec<u8> {
        let bytes = u32::try_from(length).unwrap().to_be_bytes();
        let mut frame = vec![bytes[1], bytes[2], bytes[3], kind, flags, 0, 0, 0, 1];
        frame.resize(HEAD_BYTES + length, 0xff);
        frame
    }

    fn opened(frames: &[Vec<u8>]) -> Vec<u8> {
        frames.concat()
    }

    #[test]
    fn a_head_is_open_until_its_last_byte() {
        let (settings, data) = (frame(4, 0, 12), frame(DATA, 0, 100));
        let head =
            [frame(HEADERS, 0, 10), frame(CONTINUATION, 0, 0), frame(CONTINUATION, END_HEADERS, 5)]
                .concat();
        let mut frames = FrameReader::default();
        assert_eq!(frames.open(), None, "nothing has come");
        frames.find(&settings);
        assert_eq!(frames.open(), None);
        for round in 0..3 {
            let mut open = Vec::new();
            for byte in &head[..head.len() - 1] {
                frames.find(&[*byte]);
                open.push(frames.open().unwrap_or_else(|| panic!("round {round}: {open:?}")));
            }
            open.dedup();
            assert_eq!(open.len(), 1, "it is one head");
            frames.find(&head[head.len() - 1..]);
            assert_eq!(frames.open(), None);
            // Of data, only the frame header must arrive in time.
            frames.find(&data[..8]);
            assert!(frames.open().is_some_and(|next| next > open[0]));
            frames.find(&data[8..50]);
            assert_eq!(frames.open(), None);
            frames.find(&[&data[50..], &head[..1]].concat());
            assert!(frames.open().is_some());
            frames.find(&head[1..]);
            assert_eq!(frames.open(), None);
        }
    }

    #[test]
    fn frames_without_request_or_data_are_counted() {
        let bytes = opened(&[
            frame(4, 0, 12),            // settings
            frame(HEADERS, 4, 300),     // a request
            frame(DATA, 0, 70_000),     // its data
            frame(DATA, 0, 0),          // nothing, and it goes on
            frame(DATA, END_STREAM, 0), // its end
            frame(PING, 0, 8),
            frame(8, 0, 4),   // a window
            frame(200, 0, 1), // whatever that is
        ]);
        assert_eq!(
            FrameReader::default().find(&bytes),
            FrameCounts { frames: 8, requests: 1, idle: 5 }
        );
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(
            frames in prop::collection::vec((0_u8..12, 0_u8..2, 0_usize..40), 0..20),
            cuts in prop::collection::vec(1_usize..30, 1..40),
        ) {
            let bytes = opened(&frames.iter().map(|(kind, flags, length)| frame(*kind, *flags, *length)).collect::<Vec<_>>());
            let whole = FrameReader::default().find(&bytes);
            let (mut pieces, mut rest, mut sum) = (FrameReader::default(), &bytes[..], FrameCounts::default());
            for cut in cuts.iter().cycle() {
                let (piece, behind) = rest.split_at((*cut).min(rest.len()));
                let FrameCounts { frames, requests, idle } = pieces.find(piece);
                sum = FrameCounts { frames: sum.frames + frames, requests: sum.requests + requests, idle: sum.idle + idle };
                rest = behind;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(sum, whole);
        }
    }

    #[test]
    fn a_calm_goaway_is_found_however_it_is_cut() {
        let goaway = |reason: u8, words: &str| {
            let length = u8::try_from(8 + words.len()).unwrap();
            let head = [0, 0, length, GOAWAY, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, reason];
            [&head[..], words.as_bytes()].concat()
        };
        let answers = frame(DATA, 0, 300);
        for (last, expected) in [
            (goaway(11, "too_many_resets"), true),
            (goaway(11, ""), true),
            (goaway(1, ""), false),
            (goaway(0, ""), false),
            (goaway(0, "have a nice day"), false),
            (frame(PING, 1, 8), false),
            ([goaway(11, ""), frame(PING, 1, 8)].concat(), false),
        ] {
            let said = [&answers[..], &last].concat();
            for cut in [0, 1, 9, 300, said.len() - 3, said.len()] {
                let (before, behind) = said.split_at(cut);
                let mut tail = LastBytes::default();
                tail.add([before], before.len());
                tail.add(
                    [&behind[..behind.len() / 2], &behind[behind.len() / 2..], b"not said"],
                    behind.len(),
                );
                assert_eq!(tail.ends_with_calm_goaway(), expected, "{last:?} cut at {cut}");
            }
        }
        assert!(!LastBytes::default().ends_with_calm_goaway(), "nothing was said");
    }

    /// How long the connection is paused for these bytes.
    async fn wait(allowance: &mut FrameBudget, bytes: &[u8], taken: u64) -> Duration {
        let began = Instant::now();
        allowance.arrived(bytes, taken);
        allowance.begin_turn();
        poll_fn(|context| allowance.poll(context)).await;
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn an_exhausted_budget_pauses_the_connection() {
        let mut allowance = FrameBudget::new();
        let pings = |count: usize| frame(PING, 0, 8).repeat(count);
        assert_eq!(wait(&mut allowance, &opened(&[pings(1000)]), 0).await, Duration::ZERO);
        assert!(!allowance.was_exhausted);
        let began = Instant::now();
        for _ in 0..20 {
            wait(&mut allowance, &pings(500), 0).await;
        }
        // Ten thousand more, at a thousand a second.
        let took = began.elapsed();
        assert!(allowance.was_exhausted);
        assert!(
            (Duration::from_millis(9900)..Duration::from_millis(10_500)).contains(&took),
            "{took:?}"
        );
        // The budget grows with time, up to its maximum.
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(wait(&mut allowance, &pings(1000), 0).await, Duration::ZERO);
        assert!(wait(&mut allowance, &pings(500), 0).await > Duration::from_millis(400));
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_is_some_sixty_frames_whatever_their_size() {
        let may_read = |allowance: &mut FrameBudget| {
            allowance
                .poll(&mut Context::from_waker(std::task::Waker::noop()))
                .map(|bytes| bytes / 100)
        };
        let mut allowance = FrameBudget::new();
        // Requests of fifty bytes, then one that brings a lot of data.
        allowance.arrived(&opened(&[frame(HEADERS, 5, 41).repeat(40)]), 0);
        assert_eq!(
            may_read(&mut allowance),
            Poll::Ready((64 * 50 - 2000) / 100),
            "the rest of sixty-four"
        );
        allowance.arrived(&frame(HEADERS, 5, 41).repeat(24), 0);
        assert_eq!(may_read(&mut allowance), Poll::Pending, "others have their turn");
        allowance.begin_turn();
        assert_eq!(may_read(&mut allowance), Poll::Ready(64 * 50 / 100));
        allowance.arrived(&frame(DATA, 0, 16_000), 0);
        assert_eq!(may_read(&mut allowance), Poll::Ready(((32 << 10) - 16_009) / 100));
        allowance.begin_turn();
        allowance.arrived(&frame(4, 0, 0).repeat(20), 0);
        assert_eq!(
            may_read(&mut allowance),
            Poll::Ready((1024 - 180) / 100),
            "but not byte by byte"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn requests_and_answers_bring_frames_of_their_own() {
        let mut allowance = FrameBudget::new();
        wait(&mut allowance, &opened(&[]), 0).await;
        // Every request is reset again.
        let taken_back = [frame(HEADERS, 5, 20), frame(3, 0, 4)].concat().repeat(100);
        for _ in 0..1000 {
            assert_eq!(wait(&mut allowance, &taken_back, 0).await, Duration::ZERO);
        }
        // A gigabyte is taken, and a window opened for each thousand bytes.
        for part in 1..=10_000 {
            assert_eq!(
                wait(&mut allowance, &frame(8, 0, 4).repeat(100), part * 100 * 1024).await,
                Duration::ZERO
            );
        }
        assert!(!allowance.was_exhausted);
    }
}
