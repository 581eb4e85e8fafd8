//! Conversations that share a task, as long as one thread can keep up with them.
//!
//! With a task for every connection the runtime wakes a second thread as soon as two connections
//! have something to say, and that one takes half of them. That is right when there is work for
//! two. When there is not, the threads spend their time on waking each other: a tenth of the
//! server's time at fifty connections that send one command after the other. So conversations begin
//! in one room: a single task, which asks whoever was called, one after the other, and which one
//! thread serves. When that thread is busy nearly all the time, everybody goes on in a task of
//! their own, and the runtime spreads them over all threads; when together they would not fill one
//! thread, they meet again.
//!
//! Where a conversation goes on is decided whenever it is called, so that nobody has to be moved.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::task::coop::has_budget_remaining;

use super::turns::after_the_others;

/// For how long it is counted whether a room is [full](FULL).
const TRIAL: Duration = Duration::from_millis(50);
/// Parts of a hundred of the time in which the thread of the room is at work: from there on it is
/// full.
const FULL: u128 = 95;
/// For how long it is counted whether a room [would do](CALM) again.
const LOOK: Duration = Duration::from_millis(250);
/// Parts of a hundred of the time that all together were at work: below that a room will do.
const CALM: u128 = 85;
/// A conversation adds up its own work until it is as much as this: what all add to is in
/// everybody's way.
const SHARE: Duration = Duration::from_micros(100);

type Talk = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Where conversations are held. Clones are the same room, and it is closed with the last of them.
#[derive(Clone)]
pub(crate) struct Room {
    called: Arc<Called>,
    _host: Arc<Host>,
}

impl Room {
    /// A room in the runtime of the caller. Where only one thread serves, everybody stays.
    pub(crate) fn open() -> Room {
        let called = Arc::new(Called::default());
        let can_spread = tokio::runtime::Handle::current().metrics().num_workers() > 1;
        let task = tokio::spawn(host(Arc::clone(&called), can_spread)).abort_handle();
        let host = Arc::new(Host { task, called: Arc::clone(&called) });
        Room { called, _host: host }
    }

    /// Holds a conversation, here or in the task of the caller.
    pub(crate) async fn hold(&self, talk: impl Future<Output = ()> + Send + 'static) {
        let state = State { talk: Some(Box::pin(talk)), panic: None, worked: Duration::ZERO };
        let (state, own) = (Mutex::new(state), Mutex::new(Waker::noop().clone()));
        let guest = Guest {
            state,
            own,
            is_called: AtomicBool::new(false),
            called: Arc::clone(&self.called),
        };
        let guest = Stay(Arc::new(guest));
        let waker = Waker::from(Arc::clone(&guest.0));
        let mut is_new = true;
        poll_fn(|context| {
            guest.0.own.lock().clone_from(context.waker());
            if std::mem::take(&mut is_new) {
                waker.wake_by_ref();
            }
            guest.0.turn_at_home(&waker)
        })
        .await;
    }
}

struct Host {
    task: AbortHandle,
    called: Arc<Called>,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.task.abort();
        // Whoever is still in the queue holds the queue.
        let called = std::mem::take(&mut *self.called.queue.lock());
        drop(called);
    }
}

/// Who was called, and is to be asked in the room.
struct Called {
    /// In this order.
    queue: Mutex<VecDeque<Arc<Guest>>>,
    /// Of the task that asks them.
    host: Mutex<Waker>,
    /// Everybody goes on in a task of their own.
    is_spread: AtomicBool,
    /// What all did in their own tasks since when.
    spread: Mutex<Work>,
}

impl Default for Called {
    fn default() -> Self {
        Called {
            queue: Mutex::default(),
            host: Mutex::new(Waker::noop().clone()),
            is_spread: AtomicBool::new(false),
            spread: Mutex::new(Work::since(Instant::now())),
        }
    }
}

/// How much of a time was spent at work.
struct Work {
    since: Instant,
    worked: Duration,
}

impl Work {
    fn since(since: Instant) -> Self {
        Work { since, worked: Duration::ZERO }
    }

    /// Adds what was done up to `now`. Once the time is over, says whether a room would have done,
    /// and begins anew.
    fn is_calm(&mut self, worked: Duration, now: Instant) -> bool {
        self.worked += worked;
        let all = now.saturating_duration_since(self.since);
        if all < LOOK {
            return false;
        }
        let last = std::mem::replace(self, Work::since(now));
        last.worked.as_nanos() * 100 < all.as_nanos() * CALM
    }
}

/// What the thread that serves the room did since when.
struct Trial {
    since: Instant,
    thread: ThreadId,
    /// What it had done until then, in its life.
    before: Duration,
}

impl Trial {
    fn begin(since: Instant) -> Self {
        Trial { since, thread: std::thread::current().id(), before: worked_by_this_thread() }
    }

    /// Whether it was hardly ever idle. Said once the time is over; then a new one begins.
    fn is_full(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.since) < TRIAL {
            return false;
        }
        let last = std::mem::replace(self, Trial::begin(now));
        last.was_full(self)
    }

    fn was_full(&self, next: &Trial) -> bool {
        let (all, worked) = (next.since - self.since, next.before.saturating_sub(self.before));
        // What another thread has done is not known. The room hardly ever changes threads while one
        // of them has much to do.
        self.thread == next.thread && worked.as_nanos() * 100 >= all.as_nanos() * FULL
    }
}

/// Time that it was given: not what it waited for a core that others had.
fn worked_by_this_thread() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Asks everybody who was called.
async fn host(called: Arc<Called>, can_spread: bool) {
    let mut trial = Trial::begin(Instant::now());
    poll_fn(|context| {
        called.host.lock().clone_from(context.waker());
        while has_budget_remaining() {
            let Some(guest) = called.queue.lock().pop_front() else { break };
            guest.turn_in_the_room();
        }
        if !has_budget_remaining() {
            after_the_others(context);
        }
        if can_spread {
            let now = Instant::now();
            if trial.is_full(now) {
                *called.spread.lock() = Work::since(now);
                called.is_spread.store(true, Ordering::Relaxed);
            }
        }
        Poll::<()>::Pending
    })
    .await;
}

/// One conversation, and who wakes it.
struct Guest {
    state: Mutex<State>,
    /// Of the task of its own.
    own: Mutex<Waker>,
    /// Something has happened since it was last asked.
    is_called: AtomicBool,
    called: Arc<Called>,
}

struct State {
    /// There is none when it is over.
    talk: Option<Talk>,
    /// How it ended, if it did so badly.
    panic: Option<Box<dyn std::any::Any + Send>>,
    /// In its own task, and not yet added to what all did.
    worked: Duration,
}

impl State {
    /// Asks it once, unless it is over.
    fn ask(&mut self, waker: &Waker) {
        let Some(talk) = &mut self.talk else { return };
        let polled =
            catch_unwind(AssertUnwindSafe(|| talk.as_mut().poll(&mut Context::from_waker(waker))));
        match polled {
            Ok(Poll::Pending) => return,
            Ok(Poll::Ready(())) => {}
            Err(panic) => self.panic = Some(panic),
        }
        self.talk = None;
    }
}

impl Guest {
    /// Whether it is its turn: wherever it was called to, whoever comes first asks it.
    fn is_called(&self) -> bool {
        // Whoever calls from here on means the next turn.
        self.is_called.swap(false, Ordering::SeqCst)
    }

    fn turn_in_the_room(self: Arc<Self>) {
        if !self.is_called() {
            return;
        }
        let waker = Waker::from(Arc::clone(&self));
        let is_over = {
            let mut state = self.state.lock();
            state.ask(&waker);
            state.talk.is_none()
        };
        if is_over {
            self.own.lock().wake_by_ref();
        }
    }

    fn turn_at_home(&self, waker: &Waker) -> Poll<()> {
        let is_called = self.is_called();
        let mut state = self.state.lock();
        if is_called && state.talk.is_some() {
            let start = Instant::now();
            state.ask(waker);
            let now = Instant::now();
            state.worked += now - start;
            if state.worked >= SHARE {
                self.called.add(std::mem::take(&mut state.worked), now);
            }
        }
        if let Some(panic) = state.panic.take() {
            drop(state);
            resume_unwind(panic);
        }
        if state.talk.is_some() { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl Called {
    /// Somebody has done so much in a task of their own.
    fn add(&self, worked: Duration, now: Instant) {
        if self.spread.lock().is_calm(worked, now) {
            self.is_spread.store(false, Ordering::Relaxed);
        }
    }
}

impl Wake for Guest {
    fn wake(self: Arc<Self>) {
        if self.is_called.swap(true, Ordering::SeqCst) {
            return;
        }
        if self.called.is_spread.load(Ordering::Relaxed) {
            return self.own.lock().wake_by_ref();
        }
        let called = Arc::clone(&self.called);
        let is_first = {
            let mut queue = called.queue.lock();
            queue.push_back(self);
            queue.len() == 1
        };
        if is_first {
            called.host.lock().wake_by_ref();
        }
    }

    fn wake_by_ref(self: &Arc<Self>) {
        Arc::clone(self).wake();
    }
}

/// A conversation ends with whoever waits for its end.
struct Stay(Arc<Guest>);

impl Drop for Stay {
    fn drop(&mut self) {
        let talk = self.0.state.lock().talk.take();
        // Not before the lock is given back: it may call.
        drop(talk);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::runtime::{Builder, Runtime};
    use tokio::sync::{mpsc, oneshot};
    use tokio::task::{JoinSet, yield_now};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    }

    fn spread(room: &Room, is_spread: bool) {
        room.called.is_spread.store(is_spread, Ordering::Relaxed);
    }

    #[test]
    fn everybody_is_in_one_task_until_it_is_too_much() {
        runtime().block_on(async {
            let room = Room::open();
            let (tell, mut told) = mpsc::unbounded_channel();
            let mut guests = JoinSet::new();
            let mut asks = Vec::new();
            for _ in 0..10 {
                let (ask, mut asked) = mpsc::unbounded_channel::<()>();
                asks.push(ask);
                let (room, tell) = (room.clone(), tell.clone());
                guests.spawn(async move {
                    let talk = async move {
                        while asked.recv().await.is_some() {
                            tell.send(tokio::task::id()).unwrap();
                        }
                    };
                    room.hold(talk).await;
                });
            }
            for (is_spread, tasks) in [(false, 1), (true, 10), (false, 1)] {
                // Somebody may still be where they were before.
                for times in 0.. {
                    spread(&room, is_spread);
                    let mut seen = std::collections::HashSet::new();
                    for ask in &asks {
                        ask.send(()).unwrap();
                        seen.insert(told.recv().await.unwrap());
                    }
                    if seen.len() == tasks {
                        break;
                    }
                    assert!(times < 100, "spread {is_spread}: {} tasks", seen.len());
                }
            }
        });
    }

    #[test]
    fn nobody_is_forgotten_however_often_it_changes() {
        const GUESTS: usize = 20;
        const CALLS: usize = 2_000;
        runtime().block_on(async {
            let room = Room::open();
            let mut guests = JoinSet::new();
            let answered = Arc::new(AtomicUsize::new(0));
            for _ in 0..GUESTS {
                let (ask, mut asked) = mpsc::channel::<oneshot::Sender<()>>(1);
                let (room, answered) = (room.clone(), Arc::clone(&answered));
                guests.spawn(async move {
                    let talk = async move {
                        while let Some(answer) = asked.recv().await {
                            let _ = answer.send(());
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                    };
                    room.hold(talk).await;
                });
                guests.spawn(async move {
                    for _ in 0..CALLS {
                        let (answer, answered) = oneshot::channel();
                        ask.send(answer).await.unwrap();
                        answered.await.unwrap();
                    }
                });
            }
            let changing = {
                let (room, answered) = (room.clone(), Arc::clone(&answered));
                tokio::spawn(async move {
                    for times in 0.. {
                        spread(&room, times % 2 == 0);
                        if answered.load(Ordering::Relaxed) == GUESTS * CALLS {
                            break;
                        }
                        yield_now().await;
                    }
                })
            };
            let everybody = async {
                while let Some(ended) = guests.join_next().await {
                    ended.unwrap()
                }
            };
            tokio::time::timeout(Duration::from_secs(60), everybody)
                .await
                .expect("somebody was forgotten");
            changing.await.unwrap();
        });
    }

    #[test]
    fn who_panics_ends_alone() {
        runtime().block_on(async {
            let room = Room::open();
            for is_spread in [false, true] {
                spread(&room, is_spread);
                let clumsy = room.clone();
                let ended =
                    tokio::spawn(async move { clumsy.hold(async { panic!("as a test") }).await })
                        .await;
                assert!(ended.unwrap_err().is_panic());
                room.hold(async { yield_now().await }).await;
            }
        });
    }

    #[test]
    fn a_conversation_is_dropped_with_who_waits_for_it_and_the_room_with_the_last() {
        runtime().block_on(async {
            let room = Room::open();
            let called = Arc::downgrade(&room.called);
            for is_spread in [false, true] {
                spread(&room, is_spread);
                let (held, mut dropped) = mpsc::channel::<()>(1);
                let (begin, begun) = oneshot::channel();
                let own = room.clone();
                let talk = tokio::spawn(async move {
                    let talk = async move {
                        let _held = held;
                        begin.send(()).unwrap();
                        std::future::pending().await
                    };
                    own.hold(talk).await;
                });
                begun.await.unwrap();
                talk.abort();
                assert_eq!(dropped.recv().await, None);
            }
            drop(room);
            let gone = async {
                while called.strong_count() > 0 {
                    yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(10), gone)
                .await
                .expect("the room is still there");
        });
    }

    /// In tokio a task that always finds something to do is interrupted. Here it is the room that
    /// is, and it must ask the others, too.
    #[test]
    fn who_always_has_something_to_do_does_not_keep_the_others_waiting() {
        runtime().block_on(async {
            let room = Room::open();
            let (_greedy, mut endless) = {
                let (sender, receiver) = tokio::sync::watch::channel(());
                let _ = sender.send(());
                (sender, receiver)
            };
            let own = room.clone();
            let greedy = tokio::spawn(async move {
                let talk = async move {
                    loop {
                        endless.mark_changed();
                        endless.changed().await.unwrap();
                    }
                };
                own.hold(talk).await;
            });
            let others = async {
                for _ in 0..100 {
                    room.hold(async { yield_now().await }).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), others).await.expect("they wait");
            greedy.abort();
        });
    }

    #[test]
    fn full_is_a_thread_that_is_hardly_ever_idle() {
        let begin = Instant::now();
        let trial = |millis: u64, worked: u64| Trial {
            since: begin + Duration::from_millis(millis),
            thread: std::thread::current().id(),
            before: Duration::from_millis(worked),
        };
        assert!(trial(0, 7).was_full(&trial(100, 102)));
        assert!(!trial(0, 7).was_full(&trial(100, 101)));
        let elsewhere = Trial {
            thread: std::thread::spawn(|| std::thread::current().id()).join().unwrap(),
            ..trial(0, 7)
        };
        assert!(!elsewhere.was_full(&trial(100, 107)), "nobody knows what that thread did");
        let mut trial = trial(0, 0);
        assert!(!trial.is_full(begin + TRIAL / 2), "too early");
        assert_eq!(trial.since, begin);
        let _ = trial.is_full(begin + TRIAL);
        assert_eq!(trial.since, begin + TRIAL, "another begins");
    }

    #[test]
    fn calm_is_less_work_than_one_thread_can_do() {
        let begin = Instant::now();
        for (parts, is_calm) in [(84, true), (85, false), (190, false)] {
            let mut work = Work::since(begin);
            let half = LOOK * parts / 200;
            assert!(!work.is_calm(half, begin + LOOK / 2), "too early");
            assert_eq!(work.is_calm(half, begin + LOOK), is_calm, "{parts} of a hundred");
            assert_eq!((work.since, work.worked), (begin + LOOK, Duration::ZERO));
        }
    }
}
