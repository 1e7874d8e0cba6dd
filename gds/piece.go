package gds

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/memory"
)

// A piece is a run of bytes of a file and its place in device memory.
type piece struct {
	off int64              // in the file, in bytes
	mem memory.Slice[byte] // where it goes, or comes from; its length is the piece's
}

func (p piece) end() int64 { return p.off + int64(p.mem.Len()) }

// checkPieces returns an error unless the pieces are on the device and in the
// file's order, apart from each other.
func checkPieces(op string, dev *device.Device, pieces []piece) error {
	last := int64(0)
	for i, p := range pieces {
		if err := p.mem.Check(op, dev); err != nil {
			return err
		}
		if p.off < 0 || p.end() < p.off {
			return fmt.Errorf("%s: %d bytes at byte %d: no file has such bytes", op, p.mem.Len(), p.off)
		}
		if p.off < last {
			return fmt.Errorf("%s: piece %d begins at byte %d, before byte %d where an earlier one ends: pieces are in the file's order and apart",
				op, i, p.off, last)
		}
		last = p.end()
	}
	return nil
}

// bytesOf is the length of all pieces.
func bytesOf(pieces []piece) (n int64) {
	for _, p := range pieces {
		n += int64(p.mem.Len())
	}
	return n
}

// A window is the part of a file that one slot holds, with the pieces that lie in
// it, in whole or in part. It starts at a multiple of its size, which is a power
// of two, so that what is aligned for O_DIRECT stays within one.
type window struct {
	off, end    int64
	first, last int // pieces[first:last]
}

// cut returns the windows of the size that the pieces touch.
func cut(pieces []piece, size int64) []window {
	var list []window
	for i, p := range pieces {
		for at := p.off &^ (size - 1); at < p.end(); at += size {
			if n := len(list); n > 0 && list[n-1].off == at {
				list[n-1].last = i + 1
			} else {
				list = append(list, window{at, at + size, i, i + 1})
			}
		}
	}
	return list
}

// within returns the part of a piece that lies in the window.
func (w window) within(p piece) (from, to int64) { return max(p.off, w.off), min(p.end(), w.end) }

// run returns the bytes from the i-th piece on that are moved by one call of the
// system: pieces that are at most gap bytes apart. next is the piece after them.
func (w window) run(pieces []piece, i int, gap int64) (from, to int64, next int) {
	from, to = w.within(pieces[i])
	for i++; i < w.last && pieces[i].off-to <= gap; i++ {
		_, to = w.within(pieces[i])
	}
	return from, to, i
}

// A part is bytes that lie side by side in the file and in device memory.
type part struct {
	ptr   cudadrv.DevicePtr
	off   int64 // in the file
	bytes int64
}

// part returns the bytes from the i-th piece on that one copy moves.
func (w window) part(pieces []piece, i int) (x part, next int) {
	p := pieces[i]
	from, to := w.within(p)
	x = part{p.mem.Raw() + cudadrv.DevicePtr(from-p.off), from, to - from}
	for i++; i < w.last; i++ {
		q := pieces[i]
		if q.off != p.end() || q.mem.Buffer() != p.mem.Buffer() || q.mem.Offset() != p.mem.Offset()+p.mem.Len() {
			break
		}
		_, to = w.within(q)
		x.bytes, p = to-x.off, q
	}
	return x, i
}
