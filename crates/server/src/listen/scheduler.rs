//! Runs the requests of one HTTP/2 connection on the task of the connection.
//!
//! hyper spawns every HTTP/2 request as a future. On a task of its own, each would be queued by the
//! runtime, perhaps moved to another core, and would lock and wake its connection. Here they run after
//! the connection has read all that has arrived, and the connection writes all their answers
//! together. A request that waits stays here and runs again when it is woken.
//!
//! So a connection is one task, whatever it requests, and after [`TIME_SLICE`] other tasks run. A
//! client that sends hundreds of requests at once takes one place in the queue of the runtime.

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

/// How long requests of one connection run before other tasks run. A decision takes a few
/// microseconds, a connection to an upstream a hundred.
const TIME_SLICE: Duration = Duration::from_micros(100);

type RequestFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Requests that are ready to run, in order: at most as many as a connection may have concurrently.
/// Clones share the queue.
#[derive(Clone, Default)]
pub(crate) struct RequestQueue {
    queue: Arc<Mutex<VecDeque<Runnable>>>,
}

enum Runnable {
    /// A request that has just arrived.
    New(RequestFuture),
    /// The slot of a request that was woken.
    Woken(usize),
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for RequestQueue {
    fn execute(&self, request: F) {
        self.queue.lock().push_back(Runnable::New(Box::pin(request)));
    }
}

/// Polls a connection and its requests.
pub(crate) struct RequestScheduler {
    queue: RequestQueue,
    /// Requests that have run and wait.
    slots: Vec<RequestSlot>,
    /// Indexes of empty slots.
    free: Vec<usize>,
    slice: TimeSlice,
    task_waker: Arc<TaskWaker>,
    waker: Waker,
}

impl RequestScheduler {
    pub(crate) fn of(queue: RequestQueue) -> Self {
        let task_waker = Arc::new(TaskWaker {
            state: AtomicU8::new(IDLE),
            task: Mutex::new(Waker::noop().clone()),
        });
        let waker = Waker::from(Arc::clone(&task_waker));
        RequestScheduler {
            queue,
            slots: Vec::new(),
            free: Vec::new(),
            slice: TimeSlice::default(),
            task_waker,
            waker,
        }
    }

    /// Polls the connection and the requests it spawns until all of them wait, or the time slice is
    /// over.
    pub(crate) fn poll<C: Future>(
        &mut self,
        mut connection: Pin<&mut C>,
        context: &mut Context<'_>,
    ) -> Poll<C::Output> {
        self.task_waker.set_task(context.waker());
        let waker = self.waker.clone();
        let mut inner = Context::from_waker(&waker);
        self.slice = TimeSlice::default();
        loop {
            self.task_waker.state.store(BUSY, Ordering::SeqCst);
            let polled = connection.as_mut().poll(&mut inner);
            if polled.is_pending() && self.run() {
                // Requests have run; the connection may have answers to write.
                continue;
            }
            let was_woken = self.task_waker.state.swap(IDLE, Ordering::SeqCst) == WOKEN;
            if self.slice.is_over {
                yield_to_others(context);
            } else if was_woken {
                context.waker().wake_by_ref();
            }
            return polled;
        }
    }

    /// Runs ready requests in order until the time slice is over. Returns whether any ran.
    fn run(&mut self) -> bool {
        let before = self.slice.runs;
        while !self.slice.is_over {
            let Some(turn) = self.queue.queue.lock().pop_front() else { break };
            let number = match turn {
                Runnable::New(request) => self.park(request),
                Runnable::Woken(number) => number,
            };
            let RequestSlot { request: parked, request_waker, waker } = &mut self.slots[number];
            // A wake from here on asks for another run.
            request_waker.is_queued.store(false, Ordering::SeqCst);
            // The wake may be for a request that has ended; a spurious poll of the next one in the
            // slot is harmless.
            let Some(request) = parked else { continue };
            if request.as_mut().poll(&mut Context::from_waker(waker)).is_ready() {
                *parked = None;
                self.free.push(number);
            }
            self.slice.count();
        }
        self.slice.runs > before
    }

    /// Stores a request in an empty slot, or a new one.
    fn park(&mut self, request: RequestFuture) -> usize {
        let number = self.free.pop().unwrap_or_else(|| {
            let (queue, task_waker) = (self.queue.clone(), Arc::clone(&self.task_waker));
            let number = self.slots.len();
            let request_waker = Arc::new(RequestWaker {
                number,
                is_queued: AtomicBool::new(false),
                queue,
                task_waker,
            });
            let waker = Waker::from(Arc::clone(&request_waker));
            self.slots.push(RequestSlot { request: None, request_waker, waker });
            number
        });
        self.slots[number].request = Some(request);
        number
    }

    /// Drops all requests, yielding between time slices: some of them close connections.
    pub(crate) async fn end(mut self) {
        let queue = take(&mut *self.queue.queue.lock());
        let parked = take(&mut self.slots).into_iter().filter_map(|place| place.request);
        let waiting = queue.into_iter().filter_map(|turn| match turn {
            Runnable::New(request) => Some(request),
            Runnable::Woken(_) => None,
        });
        let mut slice = TimeSlice::default();
        for request in waiting.chain(parked) {
            drop(request);
            slice.count();
            if slice.is_over {
                tokio::task::yield_now().await;
                slice = TimeSlice::default();
            }
        }
    }
}

/// A queued request may hold a waker that holds the queue: without this, both would leak.
impl Drop for RequestScheduler {
    fn drop(&mut self) {
        let queue = take(&mut *self.queue.queue.lock());
        // Drop them without the lock: they may wake each other.
        drop(queue);
    }
}

/// A request that waits, or an empty slot.
struct RequestSlot {
    request: Option<RequestFuture>,
    request_waker: Arc<RequestWaker>,
    /// `request_waker` as a [`Waker`].
    waker: Waker,
}

/// Queues a slot, at most once until it runs, and wakes the task of the connection.
struct RequestWaker {
    number: usize,
    is_queued: AtomicBool,
    queue: RequestQueue,
    task_waker: Arc<TaskWaker>,
}

impl Wake for RequestWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_queued.swap(true, Ordering::SeqCst) {
            self.queue.queue.lock().push_back(Runnable::Woken(self.number));
            self.task_waker.wake_by_ref();
        }
    }
}

/// Wakes the task after all other ready tasks have run and the IO driver was polled.
pub(crate) fn yield_to_others(context: &mut Context<'_>) {
    if tokio::runtime::Handle::try_current().is_ok() {
        // One poll of `yield_now` defers the waker.
        let _ = pin!(tokio::task::yield_now()).poll(context);
    } else {
        context.waker().wake_by_ref();
    }
}

/// The time that the requests of one connection run before other tasks run.
#[derive(Default)]
struct TimeSlice {
    runs: usize,
    until: Option<Instant>,
    is_over: bool,
}

impl TimeSlice {
    /// A request has run. The clock is first read after the second one: most slices have one.
    fn count(&mut self) {
        self.runs += 1;
        match self.until {
            None => self.until = Some(Instant::now() + TIME_SLICE),
            Some(until) => self.is_over = Instant::now() >= until,
        }
    }
}

const IDLE: u8 = 0;
const BUSY: u8 = 1;
const WOKEN: u8 = 2;

/// Wakes the task of a connection. While the task runs, a wake is only noted: otherwise every answer
/// would queue a task that is about to see it.
struct TaskWaker {
    state: AtomicU8,
    task: Mutex<Waker>,
}

impl TaskWaker {
    fn set_task(&self, waker: &Waker) {
        self.task.lock().clone_from(waker);
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.compare_exchange(BUSY, WOKEN, Ordering::SeqCst, Ordering::SeqCst) == Err(IDLE)
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

    /// Counts wakes.
    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn ready_requests_run_and_waiting_ones_run_when_woken() {
        let (queue, answered) = (RequestQueue::default(), Arc::new(AtomicUsize::new(0)));
        let mut scheduler = RequestScheduler::of(queue.clone());
        let (said, heard) = tokio::sync::oneshot::channel::<()>();
        let (asked, count, mut heard) = (queue.clone(), Arc::clone(&answered), Some(heard));
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
        assert!(scheduler.poll(connection.as_mut(), &mut Context::from_waker(&waker)).is_pending());
        assert_eq!(answered.load(Ordering::SeqCst), 3, "all ready requests");
        assert_eq!(woken.0.load(Ordering::SeqCst), 0, "a running task is not woken");
        let before = woken.0.load(Ordering::SeqCst);
        said.send(()).unwrap();
        assert_eq!(
            woken.0.load(Ordering::SeqCst),
            before + 1,
            "a waiting request wakes its connection"
        );
        assert!(scheduler.poll(connection.as_mut(), &mut Context::from_waker(&waker)).is_pending());
        assert_eq!(answered.load(Ordering::SeqCst), 4, "once it is woken");
        let before = woken.0.load(Ordering::SeqCst);
        rings.unwrap().wake();
        assert_eq!(woken.0.load(Ordering::SeqCst), before + 1, "an idle task is woken");
        assert_eq!(polls, 4, "each time once to read and once to write");
    }

    /// Requests that are always ready run no longer than a time slice, and run equally often.
    #[test]
    fn always_ready_requests_yield_after_a_time_slice() {
        for requests in [4, 100] {
            let (queue, asked) = (RequestQueue::default(), Arc::new(Mutex::new(vec![0; requests])));
            let mut scheduler = RequestScheduler::of(queue.clone());
            for number in 0..requests {
                let asked = Arc::clone(&asked);
                queue.execute(poll_fn(move |context: &mut Context<'_>| {
                    asked.lock()[number] += 1;
                    let began = Instant::now();
                    while began.elapsed() < TIME_SLICE / 4 {}
                    context.waker().wake_by_ref();
                    Poll::<()>::Pending
                }));
            }
            let woken = Arc::new(Woken::default());
            let waker = Waker::from(Arc::clone(&woken));
            for slice in 1..=500 {
                let before = woken.0.load(Ordering::SeqCst);
                assert!(
                    scheduler
                        .poll(std::pin::pin!(pending::<()>()), &mut Context::from_waker(&waker))
                        .is_pending()
                );
                // Fewer if the machine is busy.
                assert!(asked.lock().iter().sum::<usize>() <= 6 * slice);
                assert!(woken.0.load(Ordering::SeqCst) > before, "it runs again after other tasks");
            }
            let asked = asked.lock();
            let (least, most) = (asked.iter().min().unwrap(), asked.iter().max().unwrap());
            assert!(*least > 0 && *most <= least + 1, "{asked:?}");
        }
    }

    /// A request holds its waker, which holds the queue that the request is in.
    #[test]
    fn waiting_requests_are_dropped_with_their_connection() {
        let (queue, alive) = (RequestQueue::default(), Arc::new(()));
        let mut scheduler = RequestScheduler::of(queue.clone());
        let (said, heard) = tokio::sync::oneshot::channel::<()>();
        let held = Arc::clone(&alive);
        queue.execute(async move {
            let _ = heard.await;
            drop(held);
        });
        let waker = Waker::from(Arc::new(Woken::default()));
        assert!(
            scheduler
                .poll(std::pin::pin!(pending::<()>()), &mut Context::from_waker(&waker))
                .is_pending()
        );
        // A request that has not run yet, and wakes the other when it is dropped.
        let held = Arc::clone(&alive);
        queue.execute(async move {
            let _held = (held, said);
            pending::<()>().await;
        });
        let weak = Arc::downgrade(&queue.queue);
        drop((queue, scheduler));
        assert_eq!(Arc::strong_count(&alive), 1);
        assert!(weak.upgrade().is_none());
    }

    #[tokio::test]
    async fn waiting_requests_are_dropped_in_time_slices_at_the_end() {
        struct Slow(Arc<AtomicUsize>);
        impl Drop for Slow {
            fn drop(&mut self) {
                let began = Instant::now();
                while began.elapsed() < TIME_SLICE {}
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let (queue, gone) = (RequestQueue::default(), Arc::new(AtomicUsize::new(0)));
        let mut scheduler = RequestScheduler::of(queue.clone());
        let ask = |count| {
            for _ in 0..count {
                let slow = Slow(Arc::clone(&gone));
                queue.execute(async move {
                    pending::<()>().await;
                    drop(slow);
                });
            }
        };
        ask(20);
        let woken = Waker::from(Arc::new(Woken::default()));
        assert!(
            scheduler
                .poll(std::pin::pin!(pending::<()>()), &mut Context::from_waker(&woken))
                .is_pending()
        );
        ask(20);
        let mut ending = std::pin::pin!(scheduler.end());
        let mut others = 0;
        poll_fn(|context| {
            others += 1;
            ending.as_mut().poll(context)
        })
        .await;
        assert_eq!(gone.load(Ordering::SeqCst), 40);
        assert!(others > 10, "other tasks ran in between: {others}");
    }

    #[test]
    fn a_wake_during_a_poll_is_not_lost() {
        let mut scheduler = RequestScheduler::of(RequestQueue::default());
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut calls = std::pin::pin!(poll_fn(|context: &mut Context<'_>| {
            context.waker().wake_by_ref();
            Poll::<()>::Pending
        }));
        assert!(scheduler.poll(calls.as_mut(), &mut Context::from_waker(&waker)).is_pending());
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        assert!(
            scheduler
                .poll(std::pin::pin!(pending::<()>()), &mut Context::from_waker(&waker))
                .is_pending()
        );
        assert!(
            scheduler.poll(std::pin::pin!(ready(())), &mut Context::from_waker(&waker)).is_ready()
        );
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    }
}
