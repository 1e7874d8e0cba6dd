package digits

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/binary"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
)

// The shape of the task: 1536 rows for training, in order, and the rest for testing.
const (
	BatchRows = 256 // over all ranks
	Epochs    = 10
	Steps     = trainRows / BatchRows // steps in an epoch

	pixels    = 64
	hidden    = 128
	classes   = 10
	trainRows = 1536
	maxRows   = 512 // maximum size of a batch or of the test set
)

var (
	//go:embed data/digits.csv.gz
	digitsCSV []byte
	//go:embed data/reference.json
	referenceJSON []byte
	//go:embed data/w1.f32
	w1Bytes []byte
	//go:embed data/w2.f32
	w2Bytes []byte
)

// A Dataset holds rows of pixels from 0 to 1, and the digit of each row.
type Dataset struct {
	x []float32
	y []int32
}

// Rows returns the number of rows.
func (d Dataset) Rows() int { return len(d.y) }

// Slice returns the rows i to j-1.
func (d Dataset) Slice(i, j int) Dataset { return Dataset{d.x[i*pixels : j*pixels], d.y[i:j]} }

// Load returns the training rows and the test rows.
func Load() (train, test Dataset, err error) {
	z, err := gzip.NewReader(bytes.NewReader(digitsCSV))
	if err != nil {
		return train, test, err
	}
	lines, err := csv.NewReader(z).ReadAll()
	if err != nil {
		return train, test, err
	}
	var all Dataset
	for n, line := range lines {
		if len(line) != pixels+1 {
			return train, test, fmt.Errorf("digits: row %d has %d numbers: want %d", n+1, len(line), pixels+1)
		}
		for i, field := range line {
			v, err := strconv.Atoi(field)
			if err != nil {
				return train, test, fmt.Errorf("digits: row %d: %w", n+1, err)
			}
			if i == pixels {
				all.y = append(all.y, int32(v))
			} else {
				all.x = append(all.x, float32(v)/16)
			}
		}
	}
	return all.Slice(0, trainRows), all.Slice(trainRows, all.Rows()), nil
}

func floats(b []byte) []float32 {
	f := make([]float32, len(b)/4)
	for i := range f {
		f[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return f
}

// Reference returns the losses of a PyTorch run of the same task.
func Reference() ([]float64, error) {
	var r struct{ Losses []float64 }
	err := json.Unmarshal(referenceJSON, &r)
	return r.Losses, err
}

// Share returns the rows of n that a rank of size ranks trains on. Sizes differ by at most
// one, so the number of ranks need not divide the batch.
func Share(n, rank, size int) (from, to int) { return n * rank / size, n * (rank + 1) / size }
