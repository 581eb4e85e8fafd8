//! `tidegate limits`

use insta::assert_snapshot;

use crate::{shown, stdout};

#[test]
fn a_limit_is_explained() {
    assert_snapshot!(shown(&["limits", "30 PER minute  burst 15"], ""), @"
    exit 0
    --- stdout
    30/m burst 15
      A bucket that holds 15 units and regrows 30 every minute, evenly. A request passes if its
      cost is there; an empty bucket is full again after 30 s.

      capacity     15 units
      worst case   44 units within 1 min: a full burst, and what regrows before the period is over
      emptied      something is back after 2 s, everything after 30 s
      debt         debits may go 15 units below empty
      clock        judged to the microsecond
    ");
}

#[test]
fn several_limits_are_explained_together() {
    assert_snapshot!(shown(&["limits", "10/s window; 240/h sliding step 1m; 20 concurrent ttl 30s"], ""), @"
    exit 0
    --- stdout
    3 limits that are decided together: a request passes if all of them allow it, and is then
    charged to all of them. One request can take at most 10 units.

    10/s window
      At most 10 in each window of 1 s, counted by the clock from the Unix epoch. When a window
      ends, all of it is available again.

      capacity     10 units
      worst case   20 units within 1 s: the end of one window and the beginning of the next
      emptied      something is back after 1 s, everything after 1 s
      debt         debits may go 10 units below empty
      clock        judged to the microsecond

    240/h sliding step 1m
      At most 240 in any span of 1 h, counted in steps of 1 min. What was taken in a step is
      available again together, up to one step late.

      capacity     240 units
      worst case   240 units within 1 h: never more
      emptied      something is back after 1 h 59.999999 s, everything after 1 h 59.999999 s
      debt         debits may go 240 units below empty
      clock        judged to the microsecond

    20 concurrent ttl 30s
      At most 20 in flight: a request holds its units until it releases them, or for 30 s if it
      never does.

      capacity     20 units
      worst case   20 units in flight: never more
      emptied      something is back after 30 s, everything after 30 s
      clock        judged to the microsecond
    ");
}

#[test]
fn a_coarse_clock_is_shown() {
    let text = stdout(&["limits", "999983/day burst 10000000000"], "");
    assert!(text.contains("judged in ticks of 1 s"), "{text}");
}

#[test]
fn json_says_the_same() {
    assert_snapshot!(shown(&["limits", "5/20s log count rejected; 1000/day estimate", "--json"], ""), @r#"
    exit 0
    --- stdout
    [{"limit":"5/20s log count rejected","algorithm":"log","amount":5,"period_us":20000000,"capacity":5,"worst_case":5,"debt":5,"counts_rejected":true,"grid_us":1,"next_after_us":20000000,"full_after_us":20000000,"explanation":"At most 5 in any span of 20 s, exactly: every request is kept with its time and counts for 20 s. Denied requests count as well, so a client that keeps hammering stays locked out."},{"limit":"1000/d estimate","algorithm":"estimate","amount":1000,"period_us":86400000000,"capacity":1000,"worst_case":1999,"debt":1000,"counts_rejected":false,"grid_us":1,"next_after_us":86486400000,"full_after_us":172800000000,"explanation":"About 1 000 in any span of 1 d: what was taken in the previous window of the clock counts by the part of it that the span still covers."}]
    "#);
}

#[test]
fn a_mistake_is_shown_with_a_caret_under_its_column() {
    assert_snapshot!(shown(&["limits", "10/s; 240/h slidin step 1m"], ""), @r#"
    exit 2
    --- stderr
    error: invalid value '10/s; 240/h slidin step 1m' for '<LIMIT>': column 13: expected an algorithm (bucket, window, sliding, estimate, log or concurrent) or an option such as burst 20, found "slidin": did you mean sliding?

      10/s; 240/h slidin step 1m
                  ^

    For more information, try '--help'.
    "#);
    assert_snapshot!(shown(&["limits", "0/s"], ""), @"
    exit 2
    --- stderr
    error: invalid value '0/s' for '<LIMIT>': column 1: amount 0 is too small: expected at least 1

      0/s
      ^

    For more information, try '--help'.
    ");
}
