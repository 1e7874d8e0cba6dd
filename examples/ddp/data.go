package main

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/binary"
	"encoding/csv"
	"fmt"
	"math"
	"strconv"
)

// The shape of the task: 1536 rows to train on, in order, and the rest to test.
const (
	pixels    = 64
	hidden    = 128
	digits    = 10
	trainRows = 1536
	batchRows = 256
	epochs    = 10
	steps     = trainRows / batchRows // in an epoch
)

var (
	//go:embed data/digits.csv.gz
	digitsCSV []byte
	//go:embed data/w1.f32
	w1Bytes []byte
	//go:embed data/w2.f32
	w2Bytes []byte
)

// A dataset is rows of pixels from 0 to 1, and the digit of each row.
type dataset struct {
	x []float32
	y []int32
}

func (d dataset) rows() int { return len(d.y) }

func (d dataset) slice(i, j int) dataset { return dataset{d.x[i*pixels : j*pixels], d.y[i:j]} }

func loadDigits() (train, test dataset, err error) {
	z, err := gzip.NewReader(bytes.NewReader(digitsCSV))
	if err != nil {
		return train, test, err
	}
	lines, err := csv.NewReader(z).ReadAll()
	if err != nil {
		return train, test, err
	}
	var all dataset
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
	return all.slice(0, trainRows), all.slice(trainRows, all.rows()), nil
}

func floats(b []byte) []float32 {
	f := make([]float32, len(b)/4)
	for i := range f {
		f[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return f
}

// share returns the rows of n that rank of size trains on: sizes differ by at
// most one, so ranks need not divide the batch.
func share(n, rank, size int) (from, to int) { return n * rank / size, n * (rank + 1) / size }
