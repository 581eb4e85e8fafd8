//! The slot of a key: one of 16384 parts of a cluster.

/// The number of slots.
pub(super) const SLOTS: usize = 16384;

/// The slot of a hash tag, or of a key without one: CRC-16/XMODEM, modulo 16384.
pub fn slot_of(tag: &[u8]) -> u16 {
    let crc = tag
        .iter()
        .fold(0_u16, |crc, &byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)]);
    crc % 16384
}

/// The remainder for each byte, by the polynomial 0x1021.
const TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte: u16 = 0;
    while byte < 256 {
        let mut crc = byte << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 };
            bit += 1;
        }
        table[byte as usize] = crc;
        byte += 1;
    }
    table
};
