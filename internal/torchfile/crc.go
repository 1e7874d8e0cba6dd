package torchfile

import (
	"context"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"slices"
)

// Sums counts the entries of archives whose bytes CheckSums compared with their CRC-32.
type Sums struct {
	Checked int
	Without int // entries whose CRC-32 was not computed: it is 0, although they have bytes
}

// CheckSums compares the bytes of all entries of a file of size bytes with their CRC-32. The
// error names the first entry that differs.
func CheckSums(ctx context.Context, r io.ReaderAt, size int64) (s Sums, err error) {
	a, err := openArchive(r, size)
	if err != nil {
		return s, fmt.Errorf("torch.save file: %w", err)
	}
	buffer := make([]byte, 1<<20)
	for _, name := range slices.Sorted(maps.Keys(a.entries)) {
		e := a.entries[name]
		switch sum, err := a.sum(ctx, e, buffer); {
		case err != nil:
			return s, fmt.Errorf("torch.save file: entry %q: %w", name, err)
		case sum == e.crc:
			s.Checked++
		case e.crc == 0: // torch.serialization.set_crc32_options(False)
			s.Without++
		default:
			return s, fmt.Errorf("torch.save file: entry %q: CRC-32 of %d bytes is %08x, and %08x when they were saved: the file was damaged", name, e.size, sum, e.crc)
		}
	}
	return s, nil
}

// sum returns the CRC-32 of an entry.
func (a *archive) sum(ctx context.Context, e *entry, buffer []byte) (sum uint32, err error) {
	at, err := a.locate(e)
	if err != nil {
		return 0, err
	}
	for end := at + e.size; at < end; {
		b := buffer[:min(end-at, int64(len(buffer)))]
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		if err := a.read(b, at); err != nil {
			return 0, err
		}
		sum, at = crc32.Update(sum, crc32.IEEETable, b), at+int64(len(b))
	}
	return sum, nil
}
