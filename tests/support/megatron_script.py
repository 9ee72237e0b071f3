"""What Megatron-LM's own scripts say on the command line."""

TRAIN_BERT_340M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512
    --attention-backend auto
    --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 --weight-decay 1e-2 --clip-grad 1.0 --fp16
    --lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5 --weight-decay 1e-2
    --lr-warmup-fraction .01 --clip-grad 1.0
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
    --data-path my-bert_text_sentence --vocab-file bert-vocab.txt --split 949,50,1
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --save ckpt --load ckpt --eval-iters 10
    --tensorboard-dir tb
"""
"""The argument arrays of train_bert_340m_distributed.sh, in their order and with what it gives twice."""
