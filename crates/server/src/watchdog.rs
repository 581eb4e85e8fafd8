//! A thread that detects stalls of the event loop and of the store in memory.
//!
//! A lock that is never released, or a task that never yields, stops all responses without a trace.
//! A separate thread therefore has the runtime run a task, again and again, and has another thread
//! lock every shard of a store in memory. A delay of more than 100 ms is counted, and logged when
//! it is detected and when it ends. A store that is stalled for a second is not ready. A stalled
//! event loop could not answer a request for readiness.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::observe::Observer;
use crate::observe::log::Field;
use crate::observe::metrics::Stall;
use crate::supervise::Health;

/// The period of the checks.
const PERIOD: Duration = Duration::from_millis(100);
/// A check that takes longer is a stall.
const PATIENCE: Duration = Duration::from_millis(100);
/// A store that is stalled for longer is not ready.
const NOT_READY: Duration = Duration::from_secs(1);
/// The log has at most one line about each in this time.
const QUIET: Duration = Duration::from_secs(10);

/// The thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Watchdog {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches the runtime of the caller, and the locks that `enter` takes, if there are any.
    pub(crate) fn start(
        enter: Option<impl Fn() + Send + 'static>,
        observer: Observer,
        health: Health,
    ) -> Self {
        let runtime = Handle::current();
        let (stop, stopped) = mpsc::channel::<()>();
        let task = Watched::new(Stall::Runtime, move |answer| {
            _ = runtime.spawn(async move { answer.give() })
        });
        let store = enter.and_then(|enter| {
            // A stalled thread is not joined at the end.
            let (ask, asked) = mpsc::channel::<Heartbeat>();
            let go = move || {
                for answer in asked {
                    enter();
                    answer.give();
                }
            };
            std::thread::Builder::new().name("watchdog-store".into()).spawn(go).ok()?;
            Some(Watched::new(Stall::Store, move |answer| _ = ask.send(answer)))
        });
        let mut watched: Vec<Watched> = [Some(task), store].into_iter().flatten().collect();
        let watch = move || {
            let mut last = Instant::now();
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                let now = Instant::now();
                // A late wake-up of this thread means that the machine was suspended or overloaded.
                let pause = (now - last).saturating_sub(PERIOD);
                last = now;
                for one in &mut watched {
                    one.look(now, pause, &observer, &health);
                }
            }
        };
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(watch);
        // The server works without a watchdog.
        Watchdog { stop: Some(stop), thread: thread.ok() }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Whether the watched thread has run since the last check.
#[derive(Clone)]
struct Heartbeat(Arc<AtomicBool>);

impl Heartbeat {
    fn give(&self) {
        self.0.store(true, Ordering::Release);
    }
}

struct Watched {
    subject: Stall,
    ask: Box<dyn Fn(Heartbeat) + Send>,
    /// The check under way: when it began, less the delays of this thread.
    asked: Option<(Instant, Heartbeat)>,
    is_stuck: bool,
    last_said: Option<Instant>,
}

impl Watched {
    fn new(subject: Stall, ask: impl Fn(Heartbeat) + Send + 'static) -> Self {
        Watched { subject, ask: Box::new(ask), asked: None, is_stuck: false, last_said: None }
    }

    fn look(&mut self, now: Instant, pause: Duration, observer: &Observer, health: &Health) {
        if let Some((since, answer)) = &mut self.asked {
            *since += pause;
            let waited = now.saturating_duration_since(*since);
            if !answer.0.load(Ordering::Acquire) {
                if self.subject == Stall::Store && waited >= NOT_READY {
                    health.set_stuck(true);
                }
                if waited >= PATIENCE && !self.is_stuck {
                    self.is_stuck = true;
                    observer.metrics().stalled(self.subject);
                    self.say(now, observer, "stalled", waited);
                }
                return;
            }
            if std::mem::take(&mut self.is_stuck) {
                self.say(now, observer, "resumed", waited);
            }
            if self.subject == Stall::Store {
                health.set_stuck(false);
            }
        }
        let answer = Heartbeat(Arc::default());
        (self.ask)(answer.clone());
        self.asked = Some((now, answer));
    }

    fn say(&mut self, now: Instant, observer: &Observer, what: &str, waited: Duration) {
        if self.last_said.is_some_and(|last| now - last < QUIET) {
            return;
        }
        self.last_said = Some(now);
        let ms = waited.as_millis();
        let message = match self.subject {
            Stall::Runtime => "the event loop stalled; the machine may be overloaded",
            Stall::Store => "a shard of the store in memory stalled",
        };
        let fields: [Field<'_>; 3] =
            [("what", &self.subject.name()), ("state", &what), ("waited_ms", &ms)];
        observer.log().error(message, &fields);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn count(observer: &Observer, subject: Stall) -> u64 {
        let text =
            observer.metrics().text(&crate::backend::Backend::Memory(tidegate::Memory::new()), 0);
        let name = format!("tidegate_stalls_total{{what=\"{}\"}} ", subject.name());
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
    }

    fn until(what: &str, is_so: impl Fn() -> bool) {
        tidegate_testkit::wait_until(what, Duration::from_secs(60), is_so);
    }

    #[test]
    fn a_stalled_store_is_detected_and_not_ready() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _inside = runtime.enter();
        let (observer, health) = (Observer::default(), Health::default());
        let lock = Arc::new(Mutex::new(()));
        let held = lock.lock().unwrap();
        let enter = {
            let lock = Arc::clone(&lock);
            move || drop(lock.lock().unwrap())
        };
        let watchdog = Watchdog::start(Some(enter), observer.clone(), health.clone());
        until("it is detected", || count(&observer, Stall::Store) == 1);
        until("it is not ready", || health.is_failing());
        assert_eq!(count(&observer, Stall::Store), 1, "once, however long it lasts");
        drop(held);
        until("it is ready", || !health.is_failing());
        drop(watchdog);
    }

    #[test]
    fn a_stalled_event_loop_is_detected() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let _inside = runtime.enter();
        let (observer, health) = (Observer::default(), Health::default());
        let watchdog = Watchdog::start(None::<fn()>, observer.clone(), health.clone());
        let (release, wait) = mpsc::channel::<()>();
        runtime.spawn(async move {
            let _ = wait.recv();
        });
        until("it is detected", || count(&observer, Stall::Runtime) == 1);
        assert!(!health.is_failing());
        drop(release);
        drop(watchdog);
    }

    #[test]
    fn delays_of_the_watchdog_itself_are_not_stalls() {
        let (observer, health) = (Observer::default(), Health::default());
        let mut one = Watched::new(Stall::Store, |_| {});
        let start = Instant::now();
        one.look(start, Duration::ZERO, &observer, &health);
        let minute = Duration::from_secs(60);
        one.look(start + minute, minute - PATIENCE / 2, &observer, &health);
        assert_eq!(count(&observer, Stall::Store), 0);
        one.look(start + minute + PATIENCE, Duration::ZERO, &observer, &health);
        assert_eq!(count(&observer, Stall::Store), 1);
    }
}
