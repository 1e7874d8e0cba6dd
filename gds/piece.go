package gds

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/mem"
)

// checkPieces returns an error unless the pieces are on the device, in file order, and do
// not overlap.
func checkPieces(op string, dev *device.Device, pieces []piece) error {
	last := int64(0)
	for i, p := range pieces {
		if err := mem.Check(op, p.Mem.Buffer(), p.Mem.Len(), dev); err != nil {
			return err
		}
		if p.Off < 0 || p.End() < p.Off {
			return fmt.Errorf("%s: %d bytes at byte %d: no file has such bytes", op, p.Mem.Len(), p.Off)
		}
		if p.Off < last {
			return fmt.Errorf("%s: piece %d begins at byte %d, before byte %d where an earlier one ends: pieces are in the file's order and apart",
				op, i, p.Off, last)
		}
		last = p.End()
	}
	return nil
}

// bytesOf returns the total length of the pieces.
func bytesOf(pieces []piece) (n int64) {
	for _, p := range pieces {
		n += int64(p.Mem.Len())
	}
	return n
}

// A window is the part of a file that one slot holds, with the pieces that lie in it,
// completely or partly. It starts at a multiple of its size, which is a power of two, so
// that blocks aligned for O_DIRECT do not cross windows.
type window struct {
	off, end    int64
	first, last int // pieces[first:last]
}

// cut returns the windows of the given size that the pieces lie in.
func cut(pieces []piece, size int64) []window {
	var list []window
	for i, p := range pieces {
		for at := p.Off &^ (size - 1); at < p.End(); at += size {
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
func (w window) within(p piece) (from, to int64) { return max(p.Off, w.off), min(p.End(), w.end) }

// rangeOf returns the range of file bytes, beginning with piece i, that one system call moves:
// pieces that are at most gap bytes apart. next is the piece after them.
func (w window) rangeOf(pieces []piece, i int, gap int64) (from, to int64, next int) {
	from, to = w.within(pieces[i])
	for i++; i < w.last && pieces[i].Off-to <= gap; i++ {
		_, to = w.within(pieces[i])
	}
	return from, to, i
}

// A part is a range that is contiguous in the file and in device memory.
type part struct {
	ptr   cudadrv.DevicePtr
	off   int64 // in the file
	bytes int64
}

// part returns the range, beginning with piece i, that one copy moves.
func (w window) part(pieces []piece, i int) (x part, next int) {
	p := pieces[i]
	from, to := w.within(p)
	x = part{cudadrv.DevicePtr(p.Mem.Ptr()) + cudadrv.DevicePtr(from-p.Off), from, to - from}
	for i++; i < w.last; i++ {
		q := pieces[i]
		if q.Off != p.End() || q.Mem.Buffer() != p.Mem.Buffer() || q.Mem.Offset() != p.Mem.Offset()+p.Mem.Len() {
			break
		}
		_, to = w.within(q)
		x.bytes, p = to-x.off, q
	}
	return x, i
}
