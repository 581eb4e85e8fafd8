//! The targets of `tools/fuzz/` on inputs made from its seeds: not as clever as a fuzzer, but the same in
//! every run, and always run.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tidegate_server::fuzzing::{TARGETS, Target};
use tidegate_testkit::{attack_cases, attacks_held};

/// How many inputs each target gets.
const INPUTS: usize = 5_000;

#[test]
fn resp_holds() {
    runs("resp");
}

#[test]
fn json_holds() {
    runs("json");
}

#[test]
fn rules_hold() {
    runs("rules");
}

#[test]
fn envoy_holds() {
    runs("envoy");
}

#[test]
fn rls_holds() {
    runs("rls");
}

#[test]
fn limits_hold() {
    runs("limits");
}

#[test]
fn xff_ip_holds() {
    runs("xff_ip");
}

#[test]
fn forward_holds() {
    runs("forward");
}

#[test]
fn snapshot_load_holds() {
    runs("snapshot_load");
}

#[test]
fn redis_reply_holds() {
    runs("redis_reply");
}

#[test]
fn redis_peer_holds() {
    runs("redis_peer");
}

#[test]
fn every_target_is_a_program_of_the_fuzzer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/fuzz/fuzz_targets");
    let mut files: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let mut names: Vec<String> = TARGETS.iter().map(|(name, _)| format!("{name}.rs")).collect();
    names.sort();
    assert_eq!(files, names);
}

fn runs(name: &str) {
    let (_, target) = TARGETS.iter().find(|(own, _)| *own == name).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/fuzz/corpus").join(name);
    let mut files: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let seeds: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert!(!seeds.is_empty(), "no seeds in {}", folder.display());
    for seed in &seeds {
        try_one(*target, name, seed);
    }
    let mut dice = Dice(0x6675_7a7a);
    let inputs = attack_cases(INPUTS);
    for _ in 0..inputs {
        let input = mutated(&seeds, &mut dice);
        try_one(*target, name, &input);
    }
    attacks_held("mutated", seeds.len() + inputs);
}

/// Runs it, and if it fails leaves the input where a fuzzer would look for it.
fn try_one(target: Target, name: &str, input: &[u8]) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(input))) {
        eprintln!(
            "{name} fails on {} bytes: {}",
            input.len(),
            input[..input.len().min(2000)].escape_ascii()
        );
        std::panic::resume_unwind(panic);
    }
}

/// A seed with a few changes: bytes set, removed, repeated, numbers made large, or a piece of
/// another seed put in.
fn mutated(seeds: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    const WORDS: [&[u8]; 14] = [
        b"\r\n",
        b"\n",
        b"*",
        b"$-1\r\n",
        b"*-1\r\n",
        b"9223372036854775808",
        b"-1",
        b"\0",
        b"\"",
        b"{",
        b"[",
        b": ",
        b"- ",
        b"18446744073709551615",
    ];
    let mut input = seeds[dice.below(seeds.len())].clone();
    for _ in 0..1 + dice.below(6) {
        let at = dice.below(input.len() + 1);
        match dice.below(7) {
            0 if at < input.len() => input[at] = u8::try_from(dice.below(256)).unwrap(),
            1 => drop(input.drain(at..(at + 1 + dice.below(8)).min(input.len()).max(at))),
            2 => {
                input.splice(at..at, WORDS[dice.below(WORDS.len())].iter().copied()).for_each(drop)
            }
            3 => {
                let other = &seeds[dice.below(seeds.len())];
                let from = dice.below(other.len() + 1);
                let to = (from + dice.below(64)).min(other.len());
                input.splice(at..at, other[from..to].iter().copied()).for_each(drop);
            }
            4 => {
                let piece = input[at..(at + dice.below(32)).min(input.len())].to_vec();
                for _ in 0..dice.below(8) {
                    input.splice(at..at, piece.iter().copied()).for_each(drop);
                }
            }
            5 if at < input.len() => input[at] ^= 1 << dice.below(8),
            _ => input.truncate(at.max(1)),
        }
        if input.len() > 8192 {
            input.truncate(8192);
        }
    }
    input
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % bound as u64).unwrap()
    }
}
