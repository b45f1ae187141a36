from flowrl.testing import check_backend


def test_acme_keeps_the_promises_of_a_trainer():
    check_backend("acme")
