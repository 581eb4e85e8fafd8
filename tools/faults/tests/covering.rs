//! The rows that cover most. A step of its own of `cargo xtask test`: it wants the machine for
//! itself.

use std::process::ExitCode;

#[test]
#[ignore = "run by `cargo xtask test` after the other tests"]
fn the_covering_few() {
    assert_eq!(
        tidegate_faults::run(&["--quick".into()]),
        ExitCode::SUCCESS,
        "the rows that failed are above"
    );
}
