package gemm

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/internal/cublasltapi"
)

// check validates a problem that was read from a file, whose operands Chorus allocates.
func (p *Problem) check() error {
	const most = math.MaxInt32
	ok := min(p.M, p.N, p.K, p.Batch) > 0 && max(p.M, p.N, p.K, p.Batch) <= most
	for _, l := range []Layout{p.A, p.B, p.C, p.D} {
		ok = ok && typeNames[l.Type] != "" && l.LD > 0 && l.LD <= most && l.Stride >= 0 && l.Stride <= 1<<50
	}
	for _, l := range []Layout{p.Aux, p.Bias} {
		ok = ok && (typeNames[l.Type] != "" || l.Type == MaskType) && l.LD >= 0 && l.LD <= most*8 && l.Stride >= 0 && l.Stride <= 1<<50
	}
	for _, a := range p.align {
		ok = ok && a <= 8
	}
	if !ok || p.Library > CUBLASLt || p.Carveout < 0 {
		return fmt.Errorf("%s: a size, type or alignment is out of range", p)
	}
	for _, l := range []Layout{p.A, p.B, p.C, p.D, p.Aux, p.Bias} {
		// Not an int64, which could wrap around.
		size := float64(p.Batch-1)*float64(l.Stride) + float64(max(p.M, p.N, p.K))*float64(l.LD+1)
		if size > mostElements {
			return fmt.Errorf("%s: an operand has %.3g elements: want at most %d", p, size, mostElements)
		}
	}
	return p.checkEpilogue()
}

// mostElements limits an operand that was read from a file: no device has more memory.
const mostElements = 1 << 40

// Bits of epilogues of cuBLASLt.
const (
	epilogueBits = cublasltapi.EpilogueDefault | cublasltapi.EpilogueReLUAuxBias | cublasltapi.EpilogueDReLUBGrad |
		cublasltapi.EpilogueGELUAuxBias | cublasltapi.EpilogueDGELUBGrad | cublasltapi.EpilogueBGradA | cublasltapi.EpilogueBGradB
	epilogueWithAux  = cublasltapi.EpilogueReLUAux & cublasltapi.EpilogueDGELU
	epilogueWithMask = cublasltapi.EpilogueReLU | cublasltapi.EpilogueDReLU&^epilogueWithAux
	epilogueWithBias = cublasltapi.EpilogueBias | cublasltapi.EpilogueDReLUBGrad&^cublasltapi.EpilogueDReLU | cublasltapi.EpilogueBGradA | cublasltapi.EpilogueBGradB
)

// checkEpilogue validates that the product has the operands of its epilogue, in the types
// that the library expects.
func (p *Problem) checkEpilogue() error {
	e := p.Epilogue
	aux, mask, bias := e&epilogueWithAux != 0, e&epilogueWithAux != 0 && e&epilogueWithMask != 0, e&epilogueWithBias != 0
	switch {
	case e&^epilogueBits != 0, aux != (p.Aux != Layout{}), bias != (p.Bias != Layout{}):
		return fmt.Errorf("%s: the epilogue %d does not have these operands", p, e)
	case aux && mask != (p.Aux.Type == MaskType), mask && (p.Aux.LD%8 != 0 || p.Aux.Stride%8 != 0),
		aux && !mask && !p.Float8 && p.Aux.Type != p.D.Type:
		return fmt.Errorf("%s: the auxiliary operand of epilogue %d has the wrong type or strides", p, e)
	}
	return nil
}
