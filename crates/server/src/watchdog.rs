//! A thread that looks whether the others are stuck.
//!
//! A lock that nobody lets go, or a task that never lets others run, ends all answers and says
//! nothing. So a thread of its own asks the runtime to run a task, over and over, and another to go
//! through every shard of a store in memory. What takes longer than a tenth of a second is counted
//! and logged, when it is noticed and when it is over. A store that is stuck for a second is not
//! ready; whether a runtime is that is stuck, it could not say.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::observe::Observer;
use crate::observe::metrics::Stall;
use crate::supervise::Health;

/// How often it looks.
const PERIOD: Duration = Duration::from_millis(100);
/// Whoever takes longer is stuck.
const PATIENCE: Duration = Duration::from_millis(100);
/// Not ready from then on.
const NOT_READY: Duration = Duration::from_secs(1);
/// At most one line of the log about each in this time.
const QUIET: Duration = Duration::from_secs(10);

/// Looks on until it is dropped.
#[derive(Debug)]
pub(crate) struct Watchdog {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches the runtime of the caller, and whatever `enter` goes through, if there is anything.
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
            // If it is stuck, it stays so, and nobody waits for it at the end.
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
                // If we were late ourselves, the machine stood still, or had no time for anybody.
                let pause = (now - last).saturating_sub(PERIOD);
                last = now;
                for one in &mut watched {
                    one.look(now, pause, &observer, &health);
                }
            }
        };
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(watch);
        // Without it the server serves as well.
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

/// Whether somebody has answered.
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
    /// Since when somebody is asked, less what we were late ourselves.
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
                    self.say(now, observer, "stuck", waited);
                }
                return;
            }
            if std::mem::take(&mut self.is_stuck) {
                self.say(now, observer, "goes on", waited);
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
        observer.log().error(
            "somebody does not answer in time",
            &[("who", &self.subject.name()), ("state", &what), ("waited_ms", &ms)],
        );
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
    fn a_store_that_lets_nobody_in_is_noticed_and_not_ready() {
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
        until("it is noticed", || count(&observer, Stall::Store) == 1);
        until("nothing is ready", || health.is_failing());
        assert_eq!(count(&observer, Stall::Store), 1, "once, however long it lasts");
        drop(held);
        until("all is well", || !health.is_failing());
        drop(watchdog);
    }

    #[test]
    fn a_runtime_that_runs_nothing_is_noticed() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let _inside = runtime.enter();
        let (observer, health) = (Observer::default(), Health::default());
        let watchdog = Watchdog::start(None::<fn()>, observer.clone(), health.clone());
        let (release, wait) = mpsc::channel::<()>();
        runtime.spawn(async move {
            let _ = wait.recv();
        });
        until("it is noticed", || count(&observer, Stall::Runtime) == 1);
        assert!(!health.is_failing());
        drop(release);
        drop(watchdog);
    }

    #[test]
    fn what_the_machine_was_late_is_nobodys_fault() {
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
