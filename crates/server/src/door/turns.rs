//! Requests of one connection of HTTP/2, answered by the task that reads them.
//!
//! hyper hands over every request of HTTP/2 as a future of its own. As a task each would be queued, perhaps moved to another core, and from there
//! take the lock of its connection and wake it. Here they wait until the connection has read all that has arrived, then have one turn each, and the connection writes
//! all their answers at once. What has to wait for something becomes a task after all.

use std::future::Future;
use std::mem::take;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use hyper::rt::Executor;
use parking_lot::Mutex;

type Request = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Who waits for a turn: at most as many as a connection may have requests at once. Clones are the same queue.
#[derive(Clone, Default)]
pub(crate) struct Turns {
    waiting: Arc<Mutex<Vec<Request>>>,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Turns {
    fn execute(&self, request: F) {
        self.waiting.lock().push(Box::pin(request));
    }
}

/// Asks a connection and those who wait at it.
pub(crate) struct Rounds {
    turns: Turns,
    bell: Arc<Bell>,
    waker: Waker,
}

impl Rounds {
    pub(crate) fn of(turns: Turns) -> Self {
        let bell = Arc::new(Bell { state: AtomicU8::new(IDLE), task: Mutex::new(Waker::noop().clone()) });
        Rounds { turns, waker: Waker::from(Arc::clone(&bell)), bell }
    }

    /// Lets the connection do what it can, and the requests that it hands over, until there is nothing left but to wait.
    pub(crate) fn poll<C: Future>(&self, mut connection: Pin<&mut C>, context: &mut Context<'_>) -> Poll<C::Output> {
        self.bell.belongs_to(context.waker());
        let mut inner = Context::from_waker(&self.waker);
        loop {
            self.bell.state.store(BUSY, Ordering::SeqCst);
            let polled = connection.as_mut().poll(&mut inner);
            let any = self.turns.take(&mut inner);
            if polled.is_pending() && any {
                // They have something to say, and the connection has not said it yet.
                continue;
            }
            if self.bell.state.swap(IDLE, Ordering::SeqCst) == RUNG {
                context.waker().wake_by_ref();
            }
            return polled;
        }
    }
}

impl Turns {
    /// One turn for everybody who waits. Says whether there was anybody.
    fn take(&self, context: &mut Context<'_>) -> bool {
        let mut requests = take(&mut *self.waiting.lock());
        let any = !requests.is_empty();
        for mut request in requests.drain(..) {
            if request.as_mut().poll(context).is_pending() {
                // As a task it is asked again at once, and from then on it is that task which is woken.
                tokio::spawn(request);
            }
        }
        let mut waiting = self.waiting.lock();
        if waiting.capacity() == 0 {
            // The room is for the next ones.
            *waiting = requests;
        }
        any
    }
}

const IDLE: u8 = 0;
const BUSY: u8 = 1;
const RUNG: u8 = 2;

/// Wakes the task of a connection, unless it is at work anyway: then it only has to know that there is more to do. Otherwise every answer would
/// queue a task that is about to look at it.
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
        if self.state.compare_exchange(BUSY, RUNG, Ordering::SeqCst, Ordering::SeqCst) == Err(IDLE) {
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

    #[tokio::test]
    async fn who_is_ready_has_a_turn_and_others_become_tasks() {
        let (turns, answered) = (Turns::default(), Arc::new(AtomicUsize::new(0)));
        let rounds = Rounds::of(turns.clone());
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
        said.send(()).unwrap();
        while answered.load(Ordering::SeqCst) < 4 {
            tokio::task::yield_now().await;
        }
        assert_eq!(polls, 2, "once to read, once to write");
        let before = woken.0.load(Ordering::SeqCst);
        rings.unwrap().wake();
        assert_eq!(woken.0.load(Ordering::SeqCst), before + 1, "whoever sleeps is woken");
    }

    #[test]
    fn a_call_while_it_was_looking_elsewhere_is_not_forgotten() {
        let rounds = Rounds::of(Turns::default());
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut calls = std::pin::pin!(poll_fn(|context: &mut Context<'_>| {
            context.waker().wake_by_ref();
            Poll::<()>::Pending
        }));
        assert!(rounds.poll(calls.as_mut(), &mut Context::from_waker(&waker)).is_pending());
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        assert!(rounds.poll(std::pin::pin!(pending::<()>()), &mut Context::from_waker(&waker)).is_pending());
        assert!(rounds.poll(std::pin::pin!(ready(())), &mut Context::from_waker(&waker)).is_ready());
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    }
}
