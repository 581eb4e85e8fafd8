//! Faults that are put in on purpose, to see that they are found: what the simulator is worth.

/// Something that must not be, and that some law forbids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sabotage {
    /// The clock of a node stands still while it is paused or its machine sleeps, so it spends
    /// leases that are over.
    StoppedClock,
    /// Every node believes it is alone, and allows the whole limit when the store is unavailable.
    WholeShare,
    /// A call whose answer was lost is made again.
    Replay,
    /// The server answers, and forgets what it has charged.
    ForgetWrites,
    /// What a node decided alone is said to be of the store.
    HideFallback,
    /// Some answers never arrive.
    LoseAnswers,
    /// A fault does not end.
    LeaveAHole,
    /// States that are ahead of the server's clock are not rebased: keys wait until the clock has
    /// caught up.
    WaitForTheClock,
}

impl Sabotage {
    /// All of them, by name.
    pub const ALL: &[(&str, Sabotage)] = &[
        ("stopped-clock", Sabotage::StoppedClock),
        ("whole-share", Sabotage::WholeShare),
        ("replay", Sabotage::Replay),
        ("forget-writes", Sabotage::ForgetWrites),
        ("hide-fallback", Sabotage::HideFallback),
        ("lose-answers", Sabotage::LoseAnswers),
        ("leave-a-hole", Sabotage::LeaveAHole),
        ("wait-for-the-clock", Sabotage::WaitForTheClock),
    ];

    /// The laws it breaks: one of them must be the one that is found broken.
    pub fn laws(self) -> &'static [&'static str] {
        match self {
            Sabotage::StoppedClock => {
                &["leases are spent while they live", "nothing is denied unnecessarily"]
            }
            Sabotage::WholeShare => {
                &["alone within its share", "no more is owed than the cap", "not beyond the bound"]
            }
            Sabotage::Replay => &["no replay"],
            Sabotage::ForgetWrites => &["the store keeps the limit", "not beyond the bound"],
            Sabotage::HideFallback => &["no pass without a charge"],
            Sabotage::LoseAnswers => &["answered in time"],
            Sabotage::WaitForTheClock => &["as much passes as should"],
            Sabotage::LeaveAHole => {
                &["in sync two seconds after the last fault", "nothing is left behind"]
            }
        }
    }

    /// By its name.
    pub fn named(name: &str) -> Option<Sabotage> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, sabotage)| *sabotage)
    }
}
