package torchfile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
)

// Signatures and sizes of the records of a zip archive.
const (
	localSignature   = 0x04034b50
	entrySignature   = 0x02014b50
	endSignature     = 0x06054b50
	end64Signature   = 0x06064b50
	locatorSignature = 0x07064b50

	localBytes   = 30
	entryBytes   = 46
	endBytes     = 22
	end64Bytes   = 56
	locatorBytes = 20

	extraZip64 = 1
)

// An archive is the directory of a zip archive whose entries are not compressed.
type archive struct {
	r       io.ReaderAt
	data    int64 // where the directory begins: the entries end before it
	entries map[string]*entry
}

// An entry is a file in an archive.
type entry struct {
	name   string
	header int64 // position of its local header
	size   int64
	crc    uint32
}

// openArchive reads the directory of an archive of size bytes.
func openArchive(r io.ReaderAt, size int64) (*archive, error) {
	a := &archive{r: r, entries: map[string]*entry{}}
	count, at, length, err := a.findDirectory(size)
	if err != nil {
		return nil, err
	}
	if length > mostDirectory {
		return nil, fmt.Errorf("the directory of the archive has %d bytes: want at most %d", length, mostDirectory)
	}
	text := make([]byte, length)
	if err := a.read(text, at); err != nil {
		return nil, err
	}
	a.data = at
	for range count {
		if text, err = a.addEntry(text); err != nil {
			return nil, fmt.Errorf("the directory of the archive at byte %d: %w", at, err)
		}
	}
	return a, nil
}

// findDirectory returns the number of entries, and the position and length of the directory.
func (a *archive) findDirectory(size int64) (count uint64, at, length int64, err error) {
	tail := make([]byte, min(size, endBytes+math.MaxUint16))
	from := size - int64(len(tail))
	if err := a.read(tail, from); err != nil {
		return 0, 0, 0, err
	}
	end := bytes.LastIndex(tail, binary.LittleEndian.AppendUint32(nil, endSignature))
	if end < 0 || len(tail)-end < endBytes {
		return 0, 0, 0, errors.New("it has no directory at its end: the file is truncated, or is not a zip archive")
	}
	b := tail[end:]
	count = uint64(binary.LittleEndian.Uint16(b[10:]))
	n, off := uint64(binary.LittleEndian.Uint32(b[12:])), uint64(binary.LittleEndian.Uint32(b[16:]))
	limit := from + int64(end)
	if count == math.MaxUint16 || n == math.MaxUint32 || off == math.MaxUint32 {
		if count, n, off, err = a.findDirectory64(limit); err != nil {
			return 0, 0, 0, err
		}
	}
	if off > uint64(limit) || n > uint64(limit)-off || count > n/entryBytes {
		return 0, 0, 0, fmt.Errorf("it has a directory of %d entries in %d bytes at byte %d, and ends at byte %d: the file is damaged", count, n, off, size)
	}
	return count, int64(off), int64(n), nil
}

// findDirectory64 is findDirectory for large archives, and reads the record
// that is before end.
func (a *archive) findDirectory64(end int64) (count, length, at uint64, err error) {
	var b [end64Bytes]byte
	if end < locatorBytes {
		return 0, 0, 0, errors.New("its directory is incomplete")
	}
	if err := a.read(b[:locatorBytes], end-locatorBytes); err != nil {
		return 0, 0, 0, err
	}
	where := binary.LittleEndian.Uint64(b[8:])
	if binary.LittleEndian.Uint32(b[:]) != locatorSignature || where > uint64(end) {
		return 0, 0, 0, errors.New("the place of its directory is missing or outside of the file")
	}
	if err := a.read(b[:], int64(where)); err != nil {
		return 0, 0, 0, err
	}
	if binary.LittleEndian.Uint32(b[:]) != end64Signature {
		return 0, 0, 0, fmt.Errorf("it has no directory at byte %d", where)
	}
	return binary.LittleEndian.Uint64(b[32:]), binary.LittleEndian.Uint64(b[40:]), binary.LittleEndian.Uint64(b[48:]), nil
}

// addEntry adds the first entry of a directory, and returns the rest of the directory.
func (a *archive) addEntry(text []byte) (rest []byte, err error) {
	if len(text) < entryBytes || binary.LittleEndian.Uint32(text) != entrySignature {
		return nil, errors.New("an entry is incomplete")
	}
	flags, method := binary.LittleEndian.Uint16(text[8:]), binary.LittleEndian.Uint16(text[10:])
	packed, size := uint64(binary.LittleEndian.Uint32(text[20:])), uint64(binary.LittleEndian.Uint32(text[24:]))
	header := uint64(binary.LittleEndian.Uint32(text[42:]))
	name, extra, comment := int(binary.LittleEndian.Uint16(text[28:])), int(binary.LittleEndian.Uint16(text[30:])), int(binary.LittleEndian.Uint16(text[32:]))
	e := &entry{crc: binary.LittleEndian.Uint32(text[16:])}
	text = text[entryBytes:]
	if len(text) < name+extra+comment {
		return nil, errors.New("an entry is incomplete")
	}
	e.name = string(text[:name])
	if err := zip64(text[name:name+extra], &size, &packed, &header); err != nil {
		return nil, fmt.Errorf("entry %q: %w", e.name, err)
	}
	switch {
	case flags&1 != 0:
		return nil, fmt.Errorf("entry %q is encrypted", e.name)
	case strings.Contains(e.name, "/code/__torch__"):
		return nil, errors.New("it is a TorchScript program: save the state_dict() of the model instead")
	case method != 0 || packed != size:
		return nil, fmt.Errorf("entry %q is compressed: torch.save does not compress", e.name)
	case header > uint64(a.data) || size > uint64(a.data)-header:
		return nil, fmt.Errorf("entry %q of %d bytes at byte %d reaches into the directory", e.name, size, header)
	case a.entries[e.name] != nil:
		return nil, fmt.Errorf("two entries have the name %q", e.name)
	}
	e.header, e.size = int64(header), int64(size)
	a.entries[e.name] = e
	return text[name+extra+comment:], nil
}

// zip64 replaces values that do not fit into 32 bits by the values in the extra fields.
func zip64(extra []byte, values ...*uint64) error {
	for len(extra) >= 4 {
		id, n := binary.LittleEndian.Uint16(extra), int(binary.LittleEndian.Uint16(extra[2:]))
		if extra = extra[4:]; n > len(extra) {
			break
		}
		if id == extraZip64 {
			field := extra[:n]
			for _, v := range values {
				if *v == math.MaxUint32 && len(field) >= 8 {
					*v, field = binary.LittleEndian.Uint64(field), field[8:]
				}
			}
		}
		extra = extra[n:]
	}
	for _, v := range values {
		if *v > math.MaxInt64 {
			return errors.New("it is larger than any file")
		}
	}
	return nil
}

// locate returns the position of the entry's data.
func (a *archive) locate(e *entry) (int64, error) {
	var b [localBytes]byte
	if err := a.read(b[:], e.header); err != nil {
		return 0, err
	}
	if binary.LittleEndian.Uint32(b[:]) != localSignature {
		return 0, fmt.Errorf("entry %q has no header at byte %d: the file is damaged", e.name, e.header)
	}
	at := e.header + localBytes + int64(binary.LittleEndian.Uint16(b[26:])) + int64(binary.LittleEndian.Uint16(b[28:]))
	if at > a.data || e.size > a.data-at {
		return 0, fmt.Errorf("entry %q of %d bytes at byte %d reaches into the directory", e.name, e.size, at)
	}
	return at, nil
}

// open returns a reader of the entry's data.
func (a *archive) open(e *entry) (*io.SectionReader, error) {
	at, err := a.locate(e)
	if err != nil {
		return nil, err
	}
	return io.NewSectionReader(a.r, at, e.size), nil
}

// read fills b with the bytes at a position of the file.
func (a *archive) read(b []byte, at int64) error {
	n, err := a.r.ReadAt(b, at)
	switch {
	case n == len(b):
		return nil
	case errors.Is(err, io.EOF):
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read at byte %d: %w", at, err)
}

// Sums counts the entries of archives whose bytes CheckSums compared with their CRC-32.
type Sums struct {
	Checked int
	Without int // entries whose CRC-32 was not computed: it is 0, although they have bytes
}

// CheckSums compares the bytes of all entries of a file of size bytes with
// their CRC-32, and names the first entry that differs in its error.
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
