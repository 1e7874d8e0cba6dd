package job

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"
)

// Records of many members are long and regular: a world of 8,000 processes has 660 kB in JSON and a tenth
// of that compressed. The coordinator sends it to all of them.
const (
	// packFrom is the length of the records that are compressed.
	packFrom = 4 << 10
	// maxRatio limits what a compressed record may grow to, so that a short message does not fill
	// the memory. A record that is more regular is sent as it is.
	maxRatio = 64
	// maxRecord limits a record after that. Lists of 100,000 processes have 9 MB.
	maxRecord = 16 << 20
	// maxWorkerRecord limits the records of workers, which have no lists: the coordinator decodes them under its lock.
	maxWorkerRecord = 64 << 10
	// packed is the first byte of a compressed record. JSON never begins with it.
	packed = 0
)

// Pack compresses a long record.
func Pack(record []byte) []byte {
	if len(record) < packFrom {
		return record
	}
	b := bytes.NewBuffer([]byte{packed})
	if err := deflate(b, record); err != nil || b.Len() >= len(record) || len(record) > mostUnpacked(b.Len()) {
		return record
	}
	return bytes.Clone(b.Bytes())
}

// mostUnpacked returns the limit of a record that has n bytes when it is compressed.
func mostUnpacked(n int) int { return min(maxRatio*n, maxRecord) }

func deflate(to *bytes.Buffer, b []byte) error {
	w, err := flate.NewWriter(to, flate.BestSpeed)
	if err != nil {
		return err
	}
	if _, err := w.Write(b); err != nil {
		return err
	}
	return w.Close()
}

// unpack is the inverse of pack, but refuses records of more than most bytes.
func unpack(b []byte, most int) ([]byte, error) {
	if len(b) == 0 || b[0] != packed {
		if len(b) > most {
			return nil, fmt.Errorf("a record of %d bytes: want at most %d", len(b), most)
		}
		return b, nil
	}
	most = min(most, mostUnpacked(len(b)))
	record, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(b[1:])), int64(most)+1))
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	if len(record) > most {
		return nil, fmt.Errorf("a record of %d compressed bytes has more than %d bytes", len(b), most)
	}
	return record, nil
}
