//! The keys of a memory store in a file, and back.
//!
//! A file is `tidegate`, the version of the format, and blocks: a header of four numbers of 32 bits
//! (kind, bytes, checksum of the bytes, checksum of the header), and the bytes, which are words of
//! 64 bits or text. The first block has the numbers by which keys are hashed, and the last says how
//! many keys there were. In between are limits, numbered in the order in which they come, and keys.
//! A key is its hash and what is kept for it: the number of a limit and two numbers, or a whole
//! [`Record`]. Everything is little-endian.
//!
//! Every block is checked by itself. One that was damaged is left out, and so is what follows if
//! its header was.

use std::collections::HashMap;
use std::io::{self, Read, Write};

use thiserror::Error;
use tidegate_core::{CLOCK_TOLERANCE_US, Limit, Record};

use super::inner::RoomFor;
use super::interned::MAX_INTERNED;
use super::shard::KeptState;
use super::slots::Hash;
use super::{Memory, MemoryBuilder};

const MAGIC: [u8; 8] = *b"tidegate";
/// The first had keys by another hash.
const VERSION: u64 = 2;

const HEAD: u32 = 1;
const LIMITS: u32 = 2;
const KEYS: u32 = 3;
const END: u32 = 4;

/// Blocks of keys are about that long; one key may be longer.
const BLOCK_WORDS: usize = 1 << 17;
/// A shard is in the order of its hashes, and would grow slowly if they came back in that order,
/// all of them at its end: so every so many'th comes first.
const STRIDE: usize = 64;
/// Nobody has written a longer one: a key has at most 200 000 hits, or as many leases.
const MAX_BLOCK_BYTES: u32 = 64 << 20;
/// Stands where the number of a limit would, and means that a whole record follows.
const WHOLE: u64 = u64::MAX;

/// What was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Saved {
    /// How many keys.
    pub keys: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// What was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Loaded {
    /// How many keys are there again.
    pub keys: u64,
    /// How many had become the same as keys never seen.
    pub idle: u64,
    /// How many of those that are there again were later than now, and drain from now on: the clock
    /// of this machine went back.
    pub rebased: u64,
    /// How many blocks were damaged; their keys are not there.
    pub damaged_blocks: u64,
    /// How many keys are not there although they were saved, as far as that is known: damaged, no
    /// room for them, or what is kept for them makes no sense here.
    pub lost: u64,
    /// Whether the end is missing, or could not be found because of damage.
    pub truncated: bool,
}

impl Loaded {
    /// Whether nothing is missing.
    pub fn is_whole(&self) -> bool {
        self.damaged_blocks == 0 && self.lost == 0 && !self.truncated
    }
}

/// Why nothing could be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// It could not be read.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It is something else, or too short.
    #[error("is not a snapshot: expected `tidegate` at its beginning")]
    NotASnapshot,
    /// It was written by another release, whose keys are hashed or kept in another way.
    #[error("has version {0} of the format: expected {VERSION}")]
    Version(u64),
    /// Without its beginning nobody knows what the rest is about.
    #[error("is damaged at its beginning: nothing of it can be read")]
    Damaged,
}

impl Memory {
    /// Writes all keys, as they are while it writes: each shard of them at one moment, one shard
    /// after the other. Decisions go on; those about keys of the shard that is being copied wait
    /// for it: some ten microseconds for every thousand of its buckets or windows, and longer for
    /// keys that keep every hit.
    ///
    /// With the keys goes the secret by which they are hashed: whoever can read it can find keys
    /// that share a budget. Keep it as private as a password. What new keys
    /// [share](crate::memory::Overflow::SharedBucket) while there is no room for them is not saved.
    ///
    /// ```
    /// use tidegate::{Limit, ManualClock, Memory};
    /// let clock = ManualClock::new();
    /// let memory = Memory::builder().clock(clock.clone()).build();
    /// let limit: Limit = "10/s".parse()?;
    /// assert_eq!(memory.check("user:7", &limit, 4).remaining, 6);
    ///
    /// let mut file = Vec::new();
    /// memory.save(&mut file)?;
    ///
    /// let (again, loaded) = Memory::builder().clock(clock).load(&mut &file[..])?;
    /// assert!(loaded.is_whole());
    /// assert_eq!(again.check("user:7", &limit, 1).remaining, 5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self, output: &mut impl Write) -> io::Result<Saved> {
        let inner = &*self.inner;
        let mut blocks = Blocks { output, bytes: 0 };
        blocks.write_all(&MAGIC)?;
        blocks.write_all(&VERSION.to_le_bytes())?;
        blocks.words(HEAD, &[inner.seeds.0, inner.seeds.1, inner.clock.now().as_micros()])?;
        // The number of each limit in the file. Here it may have another, and that may be given to
        // another limit meanwhile.
        let mut known: HashMap<Limit, u64> = HashMap::new();
        let mut keys = 0;
        let (mut words, mut starts, mut block) = (Vec::new(), Vec::new(), Vec::new());
        for line in inner.in_use() {
            words.clear();
            starts.clear();
            let mut texts: Vec<String> = Vec::new();
            {
                let shard = line.shard.lock();
                // What a number stands for does not change while a slot of this shard has it. Most
                // keys have the limit of the one before.
                let mut seen: HashMap<u32, Option<u64>> = HashMap::new();
                let mut last = None;
                shard.for_each(&mut |hash, kept| {
                    starts.push(words.len());
                    words.extend([hash.order, hash.other]);
                    match kept {
                        KeptState::Packed { number, first, second } => {
                            let saved = match last {
                                Some((last, saved)) if last == number => saved,
                                _ => *seen.entry(number).or_insert_with(|| {
                                    let limit = inner.limits.limit(number)?;
                                    let next = known.len() as u64 + 1;
                                    let saved = *known.entry(limit).or_insert_with(|| {
                                        texts.push(limit.to_string());
                                        next
                                    });
                                    (saved <= MAX_INTERNED as u64).then_some(saved)
                                }),
                            };
                            last = Some((number, saved));
                            if let Some(saved) = saved {
                                words.extend([saved, first, second]);
                            } else {
                                words.push(WHOLE);
                                let state = inner.limits.state(number, (first, second));
                                Record { state, ..Record::default() }.write(&mut words);
                            }
                        }
                        KeptState::Record(record) => {
                            words.push(WHOLE);
                            record.write(&mut words);
                        }
                    }
                });
            }
            keys += starts.len() as u64;
            if !texts.is_empty() {
                blocks.block(LIMITS, texts.join("\n").as_bytes())?;
            }
            for key in (0..STRIDE).flat_map(|first| (first..starts.len()).step_by(STRIDE)) {
                let end = starts.get(key + 1).copied().unwrap_or(words.len());
                block.extend_from_slice(&words[starts[key]..end]);
                if block.len() >= BLOCK_WORDS {
                    blocks.words(KEYS, &block)?;
                    block.clear();
                }
            }
            if !block.is_empty() {
                blocks.words(KEYS, &block)?;
                block.clear();
            }
        }
        blocks.words(END, &[keys])?;
        blocks.output.flush()?;
        Ok(Saved { keys, bytes: blocks.bytes })
    }
}

impl MemoryBuilder {
    /// The store that [`Memory::save`] wrote, with these settings; the settings of then are not
    /// kept. Of what was damaged, as much is read as can be, and [`Loaded`] says what is missing.
    ///
    /// What has happened to time meanwhile is what the builder's clock says: if that jumped ahead,
    /// budgets have drained for as long; if it went back by more than a second, what was used stays
    /// used and drains from now on.
    ///
    /// # Errors
    /// If nothing of it can be read. Then start with an [empty](MemoryBuilder::build) one.
    pub fn load(self, input: &mut impl Read) -> Result<(Memory, Loaded), LoadError> {
        let mut first = [0; 16];
        input.read_exact(&mut first).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => LoadError::NotASnapshot,
            _ => LoadError::Io(error),
        })?;
        let (magic, version) = first.split_at(8);
        if magic != MAGIC {
            return Err(LoadError::NotASnapshot);
        }
        match words_of(version)[..] {
            [VERSION] => {}
            [version] => return Err(LoadError::Version(version)),
            _ => return Err(LoadError::NotASnapshot),
        }
        let now = self.clock.now();
        let (memory, clock_went_back) = match next_block(input)? {
            Block::Whole(HEAD, bytes) => match words_of(&bytes)[..] {
                [k0, k1, saved_at] => {
                    let went_back = saved_at.saturating_sub(now.as_micros()) > CLOCK_TOLERANCE_US;
                    (self.build_with((k0, k1)), went_back)
                }
                _ => return Err(LoadError::Damaged),
            },
            _ => return Err(LoadError::Damaged),
        };
        let mut loaded = Loaded::default();
        let mut limits = Vec::new();
        loop {
            // What cannot be read from here on is as good as cut off.
            match next_block(input).unwrap_or(Block::None) {
                Block::Whole(LIMITS, bytes) => {
                    let (text, room) =
                        (String::from_utf8_lossy(&bytes), MAX_INTERNED - limits.len());
                    limits.extend(text.lines().take(room).map(|line| line.parse::<Limit>().ok()));
                }
                Block::Whole(KEYS, bytes) => {
                    memory.restore(&words_of(&bytes), &limits, clock_went_back, &mut loaded)
                }
                Block::Whole(END, bytes) => {
                    let saved = words_of(&bytes).first().copied().unwrap_or(0);
                    loaded.lost = loaded.lost.max(saved.saturating_sub(loaded.keys + loaded.idle));
                    break;
                }
                Block::Whole(_, _) => loaded.damaged_blocks += 1,
                Block::Damaged(kind) => {
                    loaded.damaged_blocks += 1;
                    // Nobody knows which numbers the next ones have: what they are for is lost,
                    // too, but nothing is read as something else.
                    if kind == LIMITS {
                        limits.resize(MAX_INTERNED, None);
                    }
                }
                Block::None => {
                    loaded.truncated = true;
                    break;
                }
            }
        }
        Ok((memory, loaded))
    }
}

impl Memory {
    /// Brings the keys of a block back.
    fn restore(
        &self,
        words: &[u64],
        limits: &[Option<Limit>],
        clock_went_back: bool,
        loaded: &mut Loaded,
    ) {
        let (inner, now) = (&*self.inner, self.inner.clock.now());
        let mut rest = words;
        while !rest.is_empty() {
            let Some((&[order, other, limit], behind)) = rest.split_first_chunk() else {
                loaded.lost += 1;
                return;
            };
            rest = behind;
            let hash = Hash { order, other };
            let record = if limit == WHOLE {
                // What is behind a record that makes no sense cannot be found.
                let Some(record) = Record::read(&mut rest) else {
                    loaded.lost += 1;
                    return;
                };
                Some((record, None))
            } else {
                let Some((numbers, behind)) = rest.split_first_chunk::<2>() else {
                    loaded.lost += 1;
                    return;
                };
                rest = behind;
                let number = usize::try_from(limit).ok().and_then(|number| number.checked_sub(1));
                let limit = number.and_then(|number| limits.get(number)).and_then(Option::as_ref);
                limit.and_then(|limit| {
                    Some((super::shard::record_of(limit, *numbers)?, Some(limit)))
                })
            };
            let Some((mut record, limit)) = record else {
                loaded.lost += 1;
                continue;
            };
            let is_ahead = clock_went_back && record.is_ahead_of(None, now);
            if is_ahead {
                record.rebase(now);
            }
            if now >= record.idle_at() {
                loaded.idle += 1;
                continue;
            }
            let mut shard = inner.line(hash).shard.lock();
            let more = RoomFor::Key { most: inner.max_keys_per_shard, is_listed: limit.is_none() };
            if inner.has_room(&shard, more)
                && shard.restore(hash, record, limit, &inner.limits, now)
            {
                loaded.keys += 1;
                loaded.rebased += u64::from(is_ahead);
            } else {
                loaded.lost += 1;
            }
            shard.count(&inner.bytes);
            inner.publish_lines(hash, &shard);
        }
    }
}

/// What a file is written through.
struct Blocks<'a, W> {
    output: &'a mut W,
    bytes: u64,
}

impl<W: Write> Blocks<'_, W> {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes += bytes.len() as u64;
        self.output.write_all(bytes)
    }

    fn words(&mut self, kind: u32, words: &[u64]) -> io::Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.block(kind, &bytes)
    }

    fn block(&mut self, kind: u32, bytes: &[u8]) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).ok().filter(|length| *length <= MAX_BLOCK_BYTES);
        let length = length
            .ok_or_else(|| io::Error::new(io::ErrorKind::FileTooLarge, "one key has too much"))?;
        let mut header = Vec::with_capacity(16);
        for number in [kind, length, crc32fast::hash(bytes)] {
            header.extend(number.to_le_bytes());
        }
        header.extend(crc32fast::hash(&header).to_le_bytes());
        self.write_all(&header)?;
        self.write_all(bytes)
    }
}

enum Block {
    Whole(u32, Vec<u8>),
    /// Its header is as it was, so what comes behind it can be found.
    Damaged(u32),
    /// The end, or nothing that is a block.
    None,
}

/// Reads no more than there is, whatever a header claims.
fn next_block(input: &mut impl Read) -> Result<Block, LoadError> {
    let mut header = Vec::with_capacity(16);
    input.by_ref().take(16).read_to_end(&mut header)?;
    let numbers: Vec<u32> =
        header.as_chunks::<4>().0.iter().map(|number| u32::from_le_bytes(*number)).collect();
    let [kind, length, checksum, own] = numbers[..] else { return Ok(Block::None) };
    if own != crc32fast::hash(&header[..12]) || length > MAX_BLOCK_BYTES {
        return Ok(Block::None);
    }
    let mut bytes = Vec::new();
    input.by_ref().take(u64::from(length)).read_to_end(&mut bytes)?;
    if bytes.len() < length as usize {
        return Ok(Block::None);
    }
    Ok(if crc32fast::hash(&bytes) == checksum {
        Block::Whole(kind, bytes)
    } else {
        Block::Damaged(kind)
    })
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}
