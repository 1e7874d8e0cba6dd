package safefile

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
)

// Limits of a decompressed file: gzip expands up to 1,000 times; traces and
// snapshots expand 6 to 30 times.
const (
	UnzipRatio = 64
	UnzipSlack = 1 << 20 // additional bytes, for small files
)

// Unzip returns a reader of r that decompresses gzip data. It fails if the output
// becomes longer than UnzipSlack plus UnzipRatio times the input.
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
		return 0, fmt.Errorf("%d compressed bytes expand to more than %d: if you trust the file, decompress it with gunzip first", u.packed.n, u.n)
	}
	return n, err
}
