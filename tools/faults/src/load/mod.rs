//! Those who ask: at their own pace, whatever the answers do, over HTTP, and everything that was
//! answered is written down.
//!
//! Beside the nodes that are judged there is one that keeps its state in memory and gets a
//! tenth as often, by the same thread over the same kind of connection. No fault befalls it, so how
//! long it takes is what the machine adds; the rest is the product's. As often, the node that was
//! called gets an empty request, because the machine may let one process wait and not another.

mod http;
mod record;
mod stolen;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use tidegate_testkit::AbsenceWatch;

pub(crate) use self::http::Http;
use self::http::Pool;
pub(crate) use self::record::{Answer, Outcome, Record, Source, percentile};
use self::stolen::Stolen;
use tidegate_trace::Random;

/// How long to wait at the end for requests without an answer.
const LAST: Duration = Duration::from_secs(5);
/// How long a busy machine may take until no node decides alone any more, and how long that must
/// last.
const SETTLING: Duration = Duration::from_secs(10);
const CALM: Duration = Duration::from_millis(300);

/// Keys of one kind, and how much of the load they get.
#[derive(Clone, Debug)]
pub(crate) struct Class {
    pub(crate) name: &'static str,
    pub(crate) ask: Ask,
    pub(crate) keys: u16,
    pub(crate) weight: u64,
}

/// What a request says.
#[derive(Clone, Debug)]
pub(crate) enum Ask {
    /// A key and its limit.
    Limit(String),
    /// Attributes for the rules: this `kind`, and the key as `user`.
    Kind(&'static str),
}

impl Class {
    /// A name for each key that no other class has.
    pub(crate) fn key(&self, number: u16) -> String {
        format!("{}:{number}", self.name)
    }

    fn body(&self, number: u16) -> String {
        let key = self.key(number);
        match &self.ask {
            Ask::Limit(limit) => format!(r#"{{"key":"{key}","limit":"{limit}"}}"#),
            Ask::Kind(kind) => format!(r#"{{"attributes":{{"kind":"{kind}","user":"{key}"}}}}"#),
        }
    }
}

/// A load that runs until it is ended.
pub(crate) struct Load {
    began: Instant,
    began_at: SystemTime,
    orders: Arc<Orders>,
    thread: JoinHandle<Record>,
    watch: JoinHandle<Stolen>,
    absences: AbsenceWatch,
}

/// What can be changed while it runs.
struct Orders {
    stop: AtomicBool,
    rate: AtomicU64,
    /// When a node last decided alone, in milliseconds since the beginning.
    alone_ms: AtomicU64,
}

/// What the thread needs to know.
pub(crate) struct Plan {
    pub(crate) nodes: Vec<String>,
    /// The node in memory.
    pub(crate) control: String,
    pub(crate) mix: Vec<Class>,
    pub(crate) rate: u64,
    pub(crate) seed: u64,
}

impl Load {
    pub(crate) fn start(plan: Plan) -> Load {
        let (rate, alone_ms) = (AtomicU64::new(plan.rate), AtomicU64::new(0));
        let orders = Arc::new(Orders { stop: AtomicBool::new(false), rate, alone_ms });
        let own = Arc::clone(&orders);
        let (tell, told) = mpsc::channel();
        let run = move || {
            // Those who answer go first: usually they do not share their processors with those who
            // ask.
            let _ = rustix::process::nice(5);
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            tokio::task::LocalSet::new().block_on(&runtime, async {
                let asking = Asking::prepare(&plan).await;
                let began = Instant::now();
                let _ = tell.send(began);
                asking.generate(plan, began, own).await
            })
        };
        let thread =
            thread::Builder::new().name("load".into()).spawn(run).expect("a thread can be started");
        let began = told.recv().expect("the load begins");
        let own = Arc::clone(&orders);
        let watch = thread::spawn(move || Stolen::watch(began, &own));
        Load {
            began,
            began_at: SystemTime::now() - began.elapsed(),
            orders,
            thread,
            watch,
            absences: AbsenceWatch::begin(),
        }
    }

    /// Goes on asking for so long.
    pub(crate) fn goes_on(&self, lasts: Duration) {
        thread::sleep(lasts);
    }

    /// Goes on until the store has decided everything for a moment; not for ever: that is judged
    /// afterwards.
    pub(crate) fn settles(&self) {
        let end = Instant::now() + SETTLING;
        let calm = || {
            let alone = Duration::from_millis(self.orders.alone_ms.load(Ordering::Relaxed));
            self.now().saturating_sub(alone) > CALM
        };
        while !calm() && Instant::now() < end {
            thread::sleep(CALM / 10);
        }
    }

    /// Now, on the clock of the record.
    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// When it began, by the clock on the wall.
    pub(crate) fn began_at(&self) -> SystemTime {
        self.began_at
    }

    /// From now on so many a second.
    pub(crate) fn set_rate(&self, rate: u64) {
        self.orders.rate.store(rate, Ordering::Relaxed);
    }

    /// Ends it, and gives what was written down.
    pub(crate) fn end(self) -> Record {
        self.orders.stop.store(true, Ordering::Relaxed);
        let mut record = self.thread.join().expect("the load does not panic");
        record.absences = Some((self.began, self.absences.end()));
        record.stolen = self.watch.join().expect("the watch does not panic");
        record
    }
}

/// What is prepared before the first request.
struct Asking {
    /// Of each class and key.
    requests: Vec<Vec<Rc<[u8]>>>,
    /// Of each node, and last of the one in memory.
    pools: Vec<Rc<Pool>>,
    nothing: Rc<[u8]>,
}

impl Asking {
    /// Opens as many connections as are in use while a node waits for its store: clients have
    /// them, and to open them all in one moment is not the fault that is judged.
    async fn prepare(plan: &Plan) -> Asking {
        let of = |class: &Class| {
            (0..class.keys).map(|key| http::post("/v1/check", &class.body(key))).collect()
        };
        let requests = plan.mix.iter().map(of).collect();
        let nodes = plan.nodes.iter().chain([&plan.control]);
        let pools: Vec<Rc<Pool>> = nodes.map(|address| Rc::new(Pool::new(address))).collect();
        let nothing: Rc<[u8]> = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"[..].into();
        let asked_at_once =
            usize::try_from(plan.rate / 50).unwrap_or(usize::MAX) / plan.nodes.len();
        for pool in &pools {
            pool.open(asked_at_once.clamp(8, 100), &nothing).await;
        }
        Asking { requests, pools, nothing }
    }

    async fn generate(self, plan: Plan, began: Instant, orders: Arc<Orders>) -> Record {
        let Asking { requests, pools, nothing } = self;
        let memory = u8::try_from(plan.nodes.len()).expect("few nodes");
        let record = Rc::new(RefCell::new(Record::new(plan.mix.clone(), memory)));
        let control = http::post("/v1/check", r#"{"key":"control","limit":"1000000/s"}"#);
        let weights: u64 = plan.mix.iter().map(|class| class.weight).sum();
        let mut random = Random(plan.seed);
        let mut tick = tokio::time::interval(record::TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut last, mut due, mut asked) = (began, 0.0, 0_u64);
        while !orders.stop.load(Ordering::Relaxed) {
            tick.tick().await;
            let now = Instant::now();
            record.borrow_mut().runs(now - began, now - last);
            // Requests that were due during a pause of the machine are sent afterwards, but not
            // more than a moment's worth in one go.
            let rate = orders.rate.load(Ordering::Relaxed);
            due += (now - last).min(Duration::from_millis(100)).as_secs_f64()
                * f64::from(u32::try_from(rate).unwrap_or(u32::MAX));
            last = now;
            while due >= 1.0 {
                due -= 1.0;
                asked += 1;
                let mut at = random.below(weights);
                let class = plan.mix.iter().position(|class| match at.checked_sub(class.weight) {
                    Some(rest) => {
                        at = rest;
                        false
                    }
                    None => true,
                });
                let class = class.expect("the weights add up");
                let key = random.below(plan.mix[class].keys.into());
                let node =
                    usize::try_from(random.below(plan.nodes.len() as u64)).expect("it is an index");
                let key = u16::try_from(key).expect("it is below a u16");
                let request = &requests[class][usize::from(key)];
                let (class, number) = (
                    u8::try_from(class).expect("few classes"),
                    u8::try_from(node).expect("few nodes"),
                );
                ask(
                    &pools[node],
                    request,
                    &record,
                    &orders,
                    Answer::new(now - began, class, key, number),
                );
                if asked.is_multiple_of(10) {
                    ask(
                        &pools[usize::from(memory)],
                        &control,
                        &record,
                        &orders,
                        Answer::control(now - began, memory),
                    );
                    ask(
                        &pools[node],
                        &nothing,
                        &record,
                        &orders,
                        Answer::control(now - began, number),
                    );
                }
            }
        }
        let end = Instant::now() + LAST;
        while record.borrow().open > 0 && Instant::now() < end {
            tick.tick().await;
        }
        let mut record = record.take();
        record.lasted = began.elapsed();
        record
    }
}

fn ask(
    pool: &Rc<Pool>,
    request: &Rc<[u8]>,
    record: &Rc<RefCell<Record>>,
    orders: &Arc<Orders>,
    mut answer: Answer,
) {
    let (pool, request, record) = (Rc::clone(pool), Rc::clone(request), Rc::clone(record));
    let orders = Arc::clone(orders);
    record.borrow_mut().open += 1;
    let began = Instant::now();
    tokio::task::spawn_local(async move {
        (answer.outcome, answer.source) = pool.ask(&request).await;
        answer.took = began.elapsed();
        if answer.source == Some(Source::Fallback) {
            let ms = u64::try_from(answer.end().as_millis()).expect("it is a few seconds");
            orders.alone_ms.store(ms, Ordering::Relaxed);
        }
        let mut record = record.borrow_mut();
        record.open -= 1;
        record.add(answer);
    });
}
