//! Snapshots: the keys of a memory store in a file.
//!
//! A file is `tidegate`, the version of the format, and blocks: a header of four numbers of 32 bits
//! (kind, bytes, checksum of the bytes, checksum of the header), and the bytes, which are words of
//! 64 bits or text. The first block has the numbers by which keys are hashed, and the last says how
//! many keys there were. In between are limits, numbered in the order in which they come, and keys.
//! A key is its hash and its state: the number of a limit and two numbers, or a [`Record`].
//! Everything is little-endian.
//!
//! Every block has its own checksums. A damaged block is skipped; with a damaged header, the rest
//! of the file is lost.

use std::collections::HashMap;
use std::io::{self, Read, Write};

use thiserror::Error;
use tidegate_core::{CLOCK_TOLERANCE_US, Limit, Record};

use super::interned::MAX_INTERNED;
use super::room::RoomFor;
use super::shard::KeptState;
use super::slots::Hash;
use super::{Memory, MemoryBuilder};

const MAGIC: [u8; 8] = *b"tidegate";
/// The version of the format. The first one had another hash.
const VERSION: u64 = 2;

const HEAD: u32 = 1;
const LIMITS: u32 = 2;
const KEYS: u32 = 3;
const END: u32 = 4;

/// The approximate length of blocks of keys; a single key may be longer.
const BLOCK_WORDS: usize = 1 << 17;
/// A shard is sorted by hash, and insertion in that order, at its end, would be slow. So keys are
/// inserted in strides.
const STRIDE: usize = 64;
/// The longest valid block: a key has at most 200 000 hits or leases.
const MAX_BLOCK_BYTES: u32 = 64 << 20;
/// In place of the number of a limit: a record follows.
const RECORD: u64 = u64::MAX;

/// What a snapshot contains.
///
/// ```
/// let memory = tidegate::Memory::new();
/// let saved = memory.save(&mut Vec::new()).unwrap();
/// assert_eq!(saved.keys, 0);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Saved {
    /// The number of keys.
    pub keys: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// What was read from a snapshot, and what was lost.
///
/// ```
/// let mut file = Vec::new();
/// tidegate::Memory::new().save(&mut file).unwrap();
/// let (memory, loaded) = tidegate::Memory::builder().load(&mut &file[..]).unwrap();
/// assert!(loaded.is_complete() && memory.is_empty());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Loaded {
    /// The number of restored keys.
    pub keys: u64,
    /// The number of keys that are idle now and were not restored.
    pub idle: u64,
    /// The number of restored keys whose time is in the future, because the clock went back. They
    /// drain from now on.
    pub rebased: u64,
    /// The number of damaged blocks, whose keys are lost.
    pub damaged_blocks: u64,
    /// The number of saved keys that were not restored, as far as it is known: damaged, invalid, or
    /// beyond the bounds of this store.
    pub lost: u64,
    /// Whether the end of the file is missing, or was not found because of damage.
    pub truncated: bool,
}

impl Loaded {
    /// Whether every key was restored.
    pub fn is_complete(&self) -> bool {
        self.damaged_blocks == 0 && self.lost == 0 && !self.truncated
    }
}

/// Why no snapshot could be read.
///
/// ```
/// use tidegate::memory::LoadError;
/// let error = tidegate::Memory::builder().load(&mut &b"something else"[..]).unwrap_err();
/// assert!(matches!(error, LoadError::NotASnapshot));
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file could not be read.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The file is not a snapshot.
    #[error("is not a snapshot: expected `tidegate` at its beginning")]
    NotASnapshot,
    /// The file has another version of the format.
    #[error("has version {0} of the format: expected {VERSION}")]
    Version(u64),
    /// The first block is damaged, without which no other can be read.
    #[error("is damaged at its beginning: nothing of it can be read")]
    Damaged,
}

impl Memory {
    /// Writes a snapshot of all keys, one shard after the other, each consistent at one time.
    ///
    /// Decisions continue meanwhile. Those on keys of the shard that is being copied wait: some ten
    /// microseconds for every thousand of its buckets or windows, and longer for keys that have a
    /// list of hits.
    ///
    /// The snapshot contains the secret of the hash, with which collisions can be found: keep it as
    /// private as a password. The records that [overflowing](crate::store::Overflow::SharedBucket)
    /// keys share are not saved.
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
    /// assert!(loaded.is_complete());
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
        // The number of each limit in the file, which is not its number in the store: that one may
        // be given to another limit meanwhile.
        let mut known: HashMap<Limit, u64> = HashMap::new();
        let mut keys = 0;
        let (mut words, mut starts, mut block) = (Vec::new(), Vec::new(), Vec::new());
        for line in inner.in_use() {
            words.clear();
            starts.clear();
            let mut texts: Vec<String> = Vec::new();
            {
                let shard = line.shard.lock();
                // The limit of a number does not change while a slot of this shard has it. Most
                // keys have the limit of the key before.
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
                                words.push(RECORD);
                                let state = inner.limits.state(number, (first, second));
                                Record { state, ..Record::default() }.write(&mut words);
                            }
                        }
                        KeptState::Record(record) => {
                            words.push(RECORD);
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
    /// Builds a store with these settings and the keys of a snapshot by [`Memory::save`]. Of a
    /// damaged snapshot the undamaged blocks are read; [`Loaded`] has what is missing.
    ///
    /// The time since the snapshot is the builder's clock's: if it moved ahead, budgets have
    /// drained for that time. If it went back by more than a second, usage is kept and drains from
    /// now on.
    ///
    /// # Errors
    /// If no key can be read. Then start with an [empty](MemoryBuilder::build) store.
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
            Block::Intact(HEAD, bytes) => match words_of(&bytes)[..] {
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
            // An unreadable rest is the same as a truncated file.
            match next_block(input).unwrap_or(Block::None) {
                Block::Intact(LIMITS, bytes) => {
                    let (text, room) =
                        (String::from_utf8_lossy(&bytes), MAX_INTERNED - limits.len());
                    limits.extend(text.lines().take(room).map(|line| line.parse::<Limit>().ok()));
                }
                Block::Intact(KEYS, bytes) => {
                    memory.restore(&words_of(&bytes), &limits, clock_went_back, &mut loaded)
                }
                Block::Intact(END, bytes) => {
                    let saved = words_of(&bytes).first().copied().unwrap_or(0);
                    loaded.lost = loaded.lost.max(saved.saturating_sub(loaded.keys + loaded.idle));
                    break;
                }
                Block::Intact(_, _) => loaded.damaged_blocks += 1,
                Block::Damaged(kind) => {
                    loaded.damaged_blocks += 1;
                    // The numbers of later limits are unknown: their keys are lost, too, but no
                    // key gets a wrong limit.
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
    /// Restores the keys of a block.
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
            let record = if limit == RECORD {
                // The end of an invalid record is unknown.
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
                    Some((super::packed::record_of(limit, *numbers)?, Some(limit)))
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

/// The writer of blocks.
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
    Intact(u32, Vec<u8>),
    /// A damaged block with an intact header: the next block can be found.
    Damaged(u32),
    /// The end of the file, or an invalid header.
    None,
}

/// Reads a block. Allocates no more than the file has, even if a header claims more.
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
        Block::Intact(kind, bytes)
    } else {
        Block::Damaged(kind)
    })
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}
