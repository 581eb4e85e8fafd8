//! The processes of a row: nodes in front of a store, one in memory beside them, and their clients.

mod metrics;
mod node;
mod relay;

use std::time::Duration;

use tidegate::redis::Redis;
use tidegate::{Check, Limits, Op, Store};

pub(crate) use self::metrics::Metrics;
pub(crate) use self::node::{Change, Node, beside};
pub(crate) use self::relay::Relay;
use crate::load::{Ask, Class, Load, Plan, Record};
use crate::rows::Context;

/// How long anything may take that is not judged.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How many keys of the usual load have a budget that does not come back.
pub(crate) const TIGHT_KEYS: u16 = 5;

/// A limit of so many that do not come back while a row runs.
pub(crate) fn budget(amount: u64) -> String {
    format!("{amount}/1000d window")
}

/// The usual load: many keys that are never used up, and a few budgets that do not come back and
/// soon are.
pub(crate) fn usual(context: &Context) -> Vec<Class> {
    vec![
        Class { name: "plenty", ask: Ask::Limit("1000000/s".into()), keys: 500, weight: 4 },
        Class {
            name: "tight",
            ask: Ask::Limit(budget(context.tight())),
            keys: TIGHT_KEYS,
            weight: 1,
        },
    ]
}

/// Nodes and their settings.
pub(crate) struct Stage<'a> {
    context: &'a Context,
    pub(crate) nodes: Vec<Node>,
    control: Node,
    mix: Vec<Class>,
    rate: u64,
}

/// How the nodes are set.
pub(crate) struct Setup {
    /// One store for each node.
    pub(crate) stores: Vec<String>,
    /// `resilience:` of all, without the number of nodes.
    pub(crate) resilience: String,
    /// The number of nodes that each is configured with, or none if it shall count.
    pub(crate) told: Option<usize>,
    /// Lines of YAML.
    pub(crate) rules: String,
    /// So many of them, the first, are of the release before.
    pub(crate) previous: usize,
}

impl Setup {
    /// So many nodes before this store.
    pub(crate) fn new(store: &str, nodes: usize) -> Setup {
        Setup {
            stores: vec![store.to_owned(); nodes],
            resilience: "max_in_flight: 1024".into(),
            told: Some(nodes),
            rules: "rules: []\n".into(),
            previous: 0,
        }
    }

    /// Each before its own address of one store.
    pub(crate) fn each(stores: Vec<String>) -> Setup {
        let nodes = stores.len();
        Setup { stores, ..Setup::new("", nodes) }
    }

    pub(crate) fn rules(self, rules: &str) -> Setup {
        Setup { rules: rules.to_owned(), ..self }
    }

    /// The first so many are of the release before.
    pub(crate) fn previous(self, previous: usize) -> Setup {
        Setup { previous, ..self }
    }

    /// They count each other in the store.
    pub(crate) fn counted(self) -> Setup {
        Setup { told: None, ..self }
    }

    pub(crate) fn config(&self, node: usize) -> String {
        let nodes = self.told.map_or("auto".to_owned(), |told| told.to_string());
        format!(
            "store: {}\nresilience: {{ {}, nodes: {nodes} }}\n{}",
            self.stores[node], self.resilience, self.rules
        )
    }
}

impl<'a> Stage<'a> {
    pub(crate) fn start(context: &'a Context, setup: &Setup) -> Stage<'a> {
        let start = |node| match node < setup.previous {
            true => Node::start_previous(&setup.config(node)),
            false => Node::start(&setup.config(node)),
        };
        let nodes = (0..setup.stores.len()).map(start).collect();
        Stage {
            context,
            nodes,
            control: Node::start("store: memory\nrules: []\n"),
            mix: usual(context),
            rate: context.rate,
        }
    }

    /// Sends other requests than usual.
    pub(crate) fn asks(mut self, mix: Vec<Class>) -> Self {
        self.mix = mix;
        self
    }

    /// As often as this, or a quarter of that in a short run.
    pub(crate) fn rate(mut self, rate: u64) -> Self {
        self.rate = self.context.scaled(rate);
        self
    }

    /// Those who ask begin.
    pub(crate) fn load(&self) -> Load {
        // Connections of the store are made and the script is there before anything is judged.
        for node in &self.nodes {
            node.is_warm();
        }
        self.load_cold()
    }

    /// The same without looking whether the store is there.
    pub(crate) fn load_cold(&self) -> Load {
        Load::start(Plan {
            nodes: self.nodes.iter().map(|node| node.http.clone()).collect(),
            control: self.control.http.clone(),
            mix: self.mix.clone(),
            rate: self.rate,
            seed: self.context.seed,
        })
    }

    /// Everything that the nodes counted, added up.
    pub(crate) fn metrics(&self) -> Metrics {
        Metrics::sum(self.nodes.iter().filter_map(Node::metrics))
    }

    /// Those who ask have ended: what was answered, and what was counted.
    pub(crate) fn end(&self, load: Load) -> Run {
        let began = load.began_at();
        let record = load.end();
        if let Some(file) = &self.context.record {
            record.write(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
        let changes = self.nodes.iter().map(|node| node.changes(began)).collect();
        Run {
            record,
            metrics: self.metrics(),
            rate: self.rate,
            nodes: self.nodes.len() as u64,
            changes,
        }
    }
}

/// Before a fault, while it lasts, and after it: when it began and ended, and what was answered.
pub(crate) struct Scene {
    pub(crate) from: Duration,
    pub(crate) go: Duration,
    pub(crate) run: Run,
}

impl Stage<'_> {
    /// Asks all the time: so many milliseconds before the fault, during it and after it.
    pub(crate) fn play(
        &self,
        [before, during, after]: [u64; 3],
        inject: impl FnOnce(),
        lift: impl FnOnce(),
    ) -> Scene {
        let load = self.load();
        load.goes_on(Duration::from_millis(before));
        let from = load.now();
        inject();
        load.goes_on(Duration::from_millis(during));
        let go = load.now();
        lift();
        load.goes_on(Duration::from_millis(after));
        load.settles();
        Scene { from, go, run: self.end(load) }
    }
}

/// What is judged.
pub(crate) struct Run {
    pub(crate) record: Record,
    pub(crate) metrics: Metrics,
    pub(crate) rate: u64,
    pub(crate) nodes: u64,
    /// When the breaker of each node opened and closed, as they say.
    pub(crate) changes: Vec<Vec<Change>>,
}

impl Run {
    /// Whether the breaker of a node was open at some moment of this time. What they say is
    /// rounded.
    pub(crate) fn is_open(&self, from: Duration, to: Duration) -> bool {
        let from = from.saturating_sub(Duration::from_millis(1));
        self.changes.iter().any(|own| {
            let opened = own
                .iter()
                .filter(|change| matches!(change, Change::Opened(at) if *at < to))
                .count();
            let closed = own
                .iter()
                .filter(|change| matches!(change, Change::Closed(at) if *at < from))
                .count();
            opened > closed
        })
    }
}

/// What is left in the store of a key under a [`budget`].
pub(crate) fn left(store: &str, key: &str, amount: u64) -> u64 {
    ask(store, Op::Peek, key, amount)
}

/// Takes one of a key under a [`budget`].
pub(crate) fn take(store: &str, key: &str, amount: u64) {
    ask(store, Op::Check, key, amount);
}

fn ask(store: &str, op: Op, key: &str, amount: u64) -> u64 {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let limits: Limits = budget(amount).parse().expect("it is a limit");
        let redis = Redis::builder(store.parse().expect("it is an address"))
            .timeout(PATIENCE)
            .build()
            .expect("a store");
        let decided = redis.decide(&Check::of(op).charge(key, &limits, 1)).await;
        decided.unwrap_or_else(|error| panic!("{key}: {error}")).remaining()
    })
}
