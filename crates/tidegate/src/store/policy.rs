//! What happens to a charge that the store cannot decide as usual.

/// Whether a remote store decides each charge, or this node decides from its share or its copy.
///
/// ```
/// use tidegate::Limiter;
/// use tidegate::store::SyncMode;
/// # fn main() -> Result<(), tidegate::ParseError> {
/// let builder = Limiter::builder("10/s".parse()?).sync(SyncMode::Lease);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum SyncMode {
    /// The store decides every charge, except denials that the deny cache answers.
    #[default]
    Direct,
    /// This node leases a part of the budget and spends it locally. The long-run rate is exact.
    Lease,
    /// This node decides from the last answer of the store and charges in the background.
    Async,
}

impl SyncMode {
    /// The word used in configuration and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            SyncMode::Direct => "direct",
            SyncMode::Lease => "lease",
            SyncMode::Async => "async",
        }
    }
}

/// What happens to a charge when a remote store does not answer.
///
/// ```
/// use tidegate::Limiter;
/// use tidegate::store::OnFailure;
/// # fn main() -> Result<(), tidegate::ParseError> {
/// let builder = Limiter::builder("10/s".parse()?).on_failure(OnFailure::Closed);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OnFailure {
    /// This node decides locally, under the limit divided by the number of nodes.
    #[default]
    Local,
    /// The charge is allowed and counted.
    Open,
    /// The charge is denied.
    Closed,
}

impl OnFailure {
    /// The word used in configuration and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            OnFailure::Local => "local",
            OnFailure::Open => "open",
            OnFailure::Closed => "closed",
        }
    }
}

/// What a full memory store does with a new key. A key in use is never evicted for a new one.
///
/// ```
/// use tidegate::Memory;
/// use tidegate::store::Overflow;
/// let memory = Memory::builder().max_keys(100_000).overflow(Overflow::DenyNew).build();
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Overflow {
    /// All new keys share one state per limit: together they get the budget of one key.
    #[default]
    SharedBucket,
    /// New keys are denied.
    DenyNew,
    /// New keys are allowed and not counted.
    AllowNew,
}

/// What happens to a charge that the store cannot decide as usual.
///
/// ```
/// use tidegate::Check;
/// use tidegate::store::{OnFailure, Policy};
/// let policy = Policy { on_failure: Some(OnFailure::Open), ..Policy::default() };
/// let check = Check::new().policy(policy);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Policy {
    /// Whether the remote store decides it. Only the resilience layer uses it.
    pub sync: SyncMode,
    /// What happens when the remote store does not answer; the default is the setting of the
    /// resilience layer.
    pub on_failure: Option<OnFailure>,
    /// What happens in a full [memory store](crate::Memory); the default is the setting of the
    /// store.
    pub overflow: Option<Overflow>,
}
