package safefile

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
)

// Limits of an unpacked file: gzip makes up to 1,000 bytes of one, and traces and
// snapshots are 6 to 30 times as long as their compressed form.
const (
	UnzipRatio = 64
	UnzipSlack = 1 << 20 // bytes beside the ratio, for small files
)

// Unzip returns a reader of r, unpacked if gzip has compressed it. A file that becomes
// longer than UnzipSlack and UnzipRatio times what was read of it is an error.
func Unzip(r io.Reader) (io.Reader, error) {
	count := &counter{r: r}
	b := bufio.NewReader(count)
	if start, _ := b.Peek(2); !bytes.Equal(start, []byte{0x1f, 0x8b}) {
		return b, nil
	}
	z, err := gzip.NewReader(b)
	if err != nil {
		return nil, err
	}
	return &unzipped{r: z, packed: count}, nil
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	return n, err
}

type unzipped struct {
	r      io.Reader
	packed *counter
	n      int64
}

func (u *unzipped) Read(b []byte) (int, error) {
	n, err := u.r.Read(b)
	u.n += int64(n)
	if u.n > UnzipSlack+UnzipRatio*u.packed.n {
		return 0, fmt.Errorf("%d compressed bytes become more than %d: unpack the file with gunzip and name the plain one, if you trust it", u.packed.n, u.n)
	}
	return n, err
}
