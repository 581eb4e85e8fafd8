//! Requests of one connection of HTTP/2, answered by the task that reads them.
//!
//! hyper hands over every request of HTTP/2 as a future of its own. As a task each would be queued,
//! perhaps moved to another core, and from there take the lock of its connection and wake it. Here
//! they wait until the connection has read all that has arrived, then have one turn each, and the
//! connection writes all their answers at once. What has to wait for something stays here, too, and
//! has a turn when it is woken.
//!
//! So a connection is one task, whatever it asks for, and after a moment it is the other
//! connections' time. Whoever asks for hundreds of things at once does not stand before everybody
//! else in the queue a hundred times, nor does he keep the others from hearing what has arrived for
//! them.

use std::collections::VecDeque;
use std::future::Future;
use std::mem::take;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use hyper::rt::Executor;
use parking_lot::Mutex;

/// How long requests of one connection have turns before it is the others' time. A decision takes a
/// few microseconds, a connection to an upstream a hundred.
const ROUND: Duration = Duration::from_micros(100);

type Request = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Who is to have a turn, in this order: at most as many as a connection may have requests at once.
/// Clones are the same queue.
#[derive(Clone, Default)]
pub(crate) struct Turns {
    queue: Arc<Mutex<VecDeque<Turn>>>,
}

enum Turn {
    /// Of a request that has just arrived.
    First(Request),
    /// Of one that was woken: the number of its place.
    Again(usize),
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Turns {
    fn execute(&self, request: F) {
        self.queue.lock().push_back(Turn::First(Box::pin(request)));
    }
}

/// Asks a connection and those who wait at it.
pub(crate) struct Rounds {
    turns: Turns,
    /// Who had a turn and waits for something else.
    places: Vec<Place>,
    /// The numbers of places where nobody is.
    free: Vec<usize>,
    round: Round,
    bell: Arc<Bell>,
    waker: Waker,
}

impl Rounds {
    pub(crate) fn of(turns: Turns) -> Self {
        let bell =
            Arc::new(Bell { state: AtomicU8::new(IDLE), task: Mutex::new(Waker::noop().clone()) });
        let waker = Waker::from(Arc::clone(&bell));
        Rounds { turns, places: Vec::new(), free: Vec::new(), round: Round::default(), bell, waker }
    }

    /// Lets the connection do what it can, and the requests that it hands over, until there is
    /// nothing left but to wait, or others have waited long enough.
    pub(crate) fn poll<C: Future>(
        &mut self,
        mut connection: Pin<&mut C>,
        context: &mut Context<'_>,
    ) -> Poll<C::Output> {
        self.bell.belongs_to(context.waker());
        let waker = self.waker.clone();
        let mut inner = Context::from_waker(&waker);
        self.round = Round::default();
        loop {
            self.bell.state.store(BUSY, Ordering::SeqCst);
            let polled = connection.as_mut().poll(&mut inner);
            if polled.is_pending() && self.take() {
                // They have something to say, and the connection has not said it yet.
                continue;
            }
            let rung = self.bell.state.swap(IDLE, Ordering::SeqCst) == RUNG;
            if self.round.is_over {
                after_the_others(context);
            } else if rung {
                context.waker().wake_by_ref();
            }
            return polled;
        }
    }

    /// A turn for everybody who can use one, first come, first served, until the round is over.
    /// Says whether anybody had one.
    fn take(&mut self) -> bool {
        let before = self.round.turns;
        while !self.round.is_over {
            let Some(turn) = self.turns.queue.lock().pop_front() else { break };
            let number = match turn {
                Turn::First(request) => self.seat(request),
                Turn::Again(number) => number,
            };
            let Place { request: seated, alarm, waker } = &mut self.places[number];
            // Whoever calls from here on means the next turn.
            alarm.is_ringing.store(false, Ordering::SeqCst);
            // Somebody may have called for one who has left; whoever has the place now can bear it.
            let Some(request) = seated else { continue };
            if request.as_mut().poll(&mut Context::from_waker(waker)).is_ready() {
                *seated = None;
                self.free.push(number);
            }
            self.round.count();
        }
        self.round.turns > before
    }

    /// A place for a request, with an alarm that was there before, if there is one.
    fn seat(&mut self, request: Request) -> usize {
        let number = self.free.pop().unwrap_or_else(|| {
            let (turns, bell) = (self.turns.clone(), Arc::clone(&self.bell));
            let number = self.places.len();
            let alarm = Arc::new(Alarm { number, is_ringing: AtomicBool::new(false), turns, bell });
            let waker = Waker::from(Arc::clone(&alarm));
            self.places.push(Place { request: None, alarm, waker });
            number
        });
        self.places[number].request = Some(request);
        number
    }

    /// Lets go of whatever waits, a piece at a time: some of it has connections to close.
    pub(crate) async fn end(mut self) {
        let queue = take(&mut *self.turns.queue.lock());
        let seated = take(&mut self.places).into_iter().filter_map(|place| place.request);
        let waiting = queue.into_iter().filter_map(|turn| match turn {
            Turn::First(request) => Some(request),
            Turn::Again(_) => None,
        });
        let mut round = Round::default();
        for request in waiting.chain(seated) {
            drop(request);
            round.count();
            if round.is_over {
                tokio::task::yield_now().await;
                round = Round::default();
            }
        }
    }
}

/// What waits for a first turn may hold an alarm that holds the queue: nobody else would let go of
/// them.
impl Drop for Rounds {
    fn drop(&mut self) {
        let queue = take(&mut *self.turns.queue.lock());
        // Not before the lock is given back: they may call for each other.
        drop(queue);
    }
}

/// Where a request waits for something, and for a turn.
struct Place {
    request: Option<Request>,
    alarm: Arc<Alarm>,
    /// Rings the alarm.
    waker: Waker,
}

/// Has a place put into the queue, once until its turn, and the task of the connection woken.
struct Alarm {
    number: usize,
    is_ringing: AtomicBool,
    turns: Turns,
    bell: Arc<Bell>,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_ringing.swap(true, Ordering::SeqCst) {
            self.turns.queue.lock().push_back(Turn::Again(self.number));
            self.bell.wake_by_ref();
        }
    }
}

/// Has the task woken when all others that can go on have done so, and what has arrived for them
/// meanwhile was heard.
pub(crate) fn after_the_others(context: &mut Context<'_>) {
    if tokio::runtime::Handle::try_current().is_ok() {
        // Asked once, it sees to that.
        let _ = pin!(tokio::task::yield_now()).poll(context);
    } else {
        context.waker().wake_by_ref();
    }
}

/// The turns of one connection before others have theirs.
#[derive(Default)]
struct Round {
    turns: usize,
    until: Option<Instant>,
    is_over: bool,
}

impl Round {
    /// Somebody had a turn. The clock is looked at after the second one first: most rounds have
    /// one.
    fn count(&mut self) {
        self.turns += 1;
        match self.until {
            None => self.until = Some(Instant::now() + ROUND),
            Some(until) => self.is_over = Instant::now() >= until,
        }
    }
}

const IDLE: u8 = 0;
const BUSY: u8 = 1;
const RUNG: u8 = 2;

/// Wakes the task of a connection, unless it is at work anyway: then it only has to know that there
/// is more to do. Otherwise every answer would queue a task that is about to look at it.
struct Bell {
    state: AtomicU8,
    task: Mutex<Waker>,
}

impl Bell {
    fn belongs_to(&self, waker: &Waker) {
        self.task.lock().clone_from(waker);
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.compare_exchange(BUSY, RUNG, Ordering::SeqCst, Ordering::SeqCst) == Err(IDLE)
        {
            self.task.lock().wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, poll_fn, ready};
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// How often it was woken.
    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn who_is_ready_has_a_turn_and_others_have_one_later() {
        let (turns, answered) = (Turns::default(), Arc::new(AtomicUsize::new(0)));
        let mut rounds = Rounds::of(turns.clone());
        let (said, heard) = tokio::sync::oneshot::channel::<()>();
        let (asked, count, mut heard) = (turns.clone(), Arc::clone(&answered), Some(heard));
        let mut rings = None;
        let mut polls = 0;
        let mut connection = std::pin::pin!(poll_fn(|context: &mut Context<'_>| {
            polls += 1;
            if let Some(heard) = heard.take() {
                for _ in 0..3 {
                    let (count, waker) = (Arc::clone(&count), context.waker().clone());
                    asked.execute(async move {
                        count.fetch_add(1, Ordering::SeqCst);
                        waker.wake();
                    });
                }
                let count = Arc::clone(&count);
                asked.execute(async move {
                    let _ = heard.await;
                    count.fetch_add(1, Ordering::SeqCst);
                });
                rings = Some(context.waker().clone());
            }
            Poll::<()>::Pending
        }));
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        assert!(rounds.poll(connection.as_mut(), &mut Context::from_waker(&waker)).is_pending());
        assert_eq!(answered.load(Ordering::SeqCst), 3, "all that are ready");
        assert_eq!(woken.0.load(Ordering::SeqCst), 0, "whoever is at work is not woken");
        let before = woken.0.load(Ordering::SeqCst);
        said.send(()).unwrap();
        assert_eq!(
            woken.0.load(Ordering::SeqCst),
            before + 1,
            "whoever waits is woken with its connection"
        );
        assert!(rounds.poll(connection.as_mut(), &mut Context::from_waker(&waker)).is_pending());
        assert_eq!(answered.load(Ordering::SeqCst), 4, "when it is here");
        let before = woken.0.load(Ordering::SeqCst);
        rings.unwrap().wake();
        assert_eq!(woken.0.load(Ordering::SeqCst), before + 1, "whoever sleeps is woken");
        assert_eq!(polls, 4, "each time once to read and once to write");
    }

    /// Requests that never have enough take no longer than their round, and everybody has as many
    /// turns as the others: also where so few ask that a round is over when all had one.
    #[test]
    fn after_a_round_it_is_the_others_time() {
        for requests in [4, 100] {
            let (turns, asked) = (Turns::default(), Arc::new(Mutex::new(vec![0; requests])));
            let mut rounds = Rounds::of(turns.clone());
            for number in 0..requests {
                let asked = Arc::clone(&asked);
                turns.execute(poll_fn(move |context: &mut Context<'_>| {
                    asked.lock()[number] += 1;
                    let began = Instant::now();
                    while began.elapsed() < ROUND / 4 {}
                    context.waker().wake_by_ref();
                    Poll::<()>::Pending
                }));
            }
            let woken = Arc::new(Woken::default());
            let waker = Waker::from(Arc::clone(&woken));
            for round in 1..=500 {
                let before = woken.0.load(Ordering::SeqCst);
                assert!(
                    rounds
                        .poll(std::pin::pin!(pending::<()>()), &mut Context::from_waker(&waker))
                        .is_pending()
                );
                // Fewer if the machine has other things to do.
                assert!(asked.lock().iter().sum::<usize>() <= 6 * round);
                assert!(
                    woken.0.load(Ordering::SeqCst) > before,
                    "it goes on when the others had their time"
                );
            }
            let asked = asked.lock();
            let (least, most) = (asked.iter().min().unwrap(), asked.iter().max().unwrap());
            assert!(*least > 0 && *most <= least + 1, "{asked:?}");
        }
    }

    /// A request holds whoever wakes it, who holds the queue in which it waits.
    #[test]
    fn what_waits_is_let_go_with_its_connection() {
        let (turns, alive) = (Turns::default(), Arc::new(()));
        let mut rounds = Rounds::of(turns.clone());
        let (said, heard) = tokio::sync::oneshot::channel::<()>();
        let held = Arc::clone(&alive);
        turns.execute(async move {
            let _ = heard.await;
            drop(held);
        });
        let waker = Waker::from(Arc::new(Woken::default()));
        assert!(
            rounds
                .poll(std::pin::pin!(pending::<()>()), &mut Context::from_waker(&waker))
                .is_pending()
        );
        // One that waits for its first turn, and calls for the other when it is let go.
        let held = Arc::clone(&alive);
        turns.execute(async move {
            let _held = (held, said);
            pending::<()>().await;
        });
        let queue = Arc::downgrade(&turns.queue);
        drop((turns, rounds));
        assert_eq!(Arc::strong_count(&alive), 1);
        assert!(queue.upgrade().is_none());
    }

    #[tokio::test]
    async fn what_waits_at_the_end_is_let_go_a_piece_at_a_time() {
        struct Slow(Arc<AtomicUsize>);
        impl Drop for Slow {
            fn drop(&mut self) {
                let began = Instant::now();
                while began.elapsed() < ROUND {}
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let (turns, gone) = (Turns::default(), Arc::new(AtomicUsize::new(0)));
        let mut rounds = Rounds::of(turns.clone());
        let ask = |count| {
            for _ in 0..count {
                let slow = Slow(Arc::clone(&gone));
                turns.execute(async move {
                    pending::<()>().await;
                    drop(slow);
                });
            }
        };
        ask(20);
        let woken = Waker::from(Arc::new(Woken::default()));
        assert!(
            rounds
                .poll(std::pin::pin!(pending::<()>()), &mut Context::from_waker(&woken))
                .is_pending()
        );
        ask(20);
        let mut ending = std::pin::pin!(rounds.end());
        let mut others = 0;
        poll_fn(|context| {
            others += 1;
            ending.as_mut().poll(context)
        })
        .await;
        assert_eq!(gone.load(Ordering::SeqCst), 40);
        assert!(others > 10, "others had their time in between: {others}");
    }

    #[test]
    fn a_call_while_it_was_looking_elsewhere_is_not_forgotten() {
        let mut rounds = Rounds::of(Turns::default());
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut calls = std::pin::pin!(poll_fn(|context: &mut Context<'_>| {
            context.waker().wake_by_ref();
            Poll::<()>::Pending
        }));
        assert!(rounds.poll(calls.as_mut(), &mut Context::from_waker(&waker)).is_pending());
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        assert!(
            rounds
                .poll(std::pin::pin!(pending::<()>()), &mut Context::from_waker(&waker))
                .is_pending()
        );
        assert!(
            rounds.poll(std::pin::pin!(ready(())), &mut Context::from_waker(&waker)).is_ready()
        );
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    }
}
